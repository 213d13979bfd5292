"""`vitrail bench`: workloads, the load they make on a server, on an offline engine or on a vision
tower alone, and what was measured, as figures, a comparison and a plot. Imports nothing."""
