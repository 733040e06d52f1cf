"""Trains the runs that a JSON file names, one after another in the same processes: starting Python takes seconds."""

import json
import os
import sys
from pathlib import Path

import torch.distributed

from zerokara import config
from zerokara.training import launcher, preparation, run_folder
from zerokara.training.session import Session

work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
for job in work["jobs"]:
    stop_at = job.pop("stop_at", None)
    overrides = [f"{key}={value}" for key, value in job.items()]
    loaded = config.load(config.PretrainConfig, work["config"], overrides)
    plan = preparation.prepare(loaded, int(os.environ["WORLD_SIZE"]), launcher.precision(loaded))
    if int(os.environ["RANK"]) == 0:
        run_folder.claim(plan)
    session = Session(plan)
    if stop_at is not None:
        at_edge = session._at_edge

        def stopping(record, at_edge=at_edge, session=session, stop_at=stop_at):  # type: ignore[no-untyped-def]
            at_edge(record)
            if record.step == stop_at - 1:
                session.stop.reason = "test"

        session._at_edge = stopping  # type: ignore[method-assign]
    session.run()
    torch.distributed.barrier()
