"""`vitrail check`: a checkpoint, a device and the user's choices, proved before anything runs.

Owns the plans that start-up and check make alike (`sizes`, `encoder_peak`, `weights`), the rows of
the report and the proof by running on no device at all (`trace`). Reads headers, never weights.
Refuses to know requests, schedulers and HTTP."""
