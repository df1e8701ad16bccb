"""Where readings begin to mean trouble: declared once, for the alert rules and the dashboards alike.

A color on a dashboard and an alert then never disagree. deploy/prometheus/rules/gpuwarden.yml repeats these numbers;
a test keeps it in step.
"""

NEAR_OUT_OF_MEMORY = 0.05  # ratio: of the memory a run uses and can still allocate, the part it can still allocate
DIED_SECONDS = 300.0  # that the end of a run is told of
PEAK_RISE_SECONDS = 600.0  # a peak that last rose longer ago says nothing of what comes next
ERROR_SECONDS = 600.0  # that an error of a run is told of
INPUT_BOUND = 0.5  # ratio: of the time of steps, the part in which they wait for their input
INPUT_BOUND_SECONDS = 300.0  # over which that is taken: what a run does once an epoch is no rule
NEAR_SLOWDOWN = 5.0  # celsius left before the device slows itself down
XID_SECONDS = 3600.0  # that an XID is told of, as nothing says when its cause is mended
STALE_POLLS = 3.0  # poll intervals without a new poll after which the page no longer tells of now,
STALE_POLL_SECONDS = 60.0  # but at least this long
