"""What a run would come to, before it is paid for: scaling laws from small runs, and plans for time and machine."""
