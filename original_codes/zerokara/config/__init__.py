"""The YAML files as frozen objects: strict loading (`loading`), one error that lists every fault.

Each file is a class of its own, which consists of components: `ModelSettings`, `DataSettings`, `DataOrderSettings`,
`ScheduleSettings`, `OptimSettings`, `MachineSettings`, `MonitoringSettings`. Code takes the component that it reads.
"""
