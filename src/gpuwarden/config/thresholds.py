"""Thresholds that alert rules, dashboards, pressure and the status page share, so that a color and an alert agree.

`gpuwarden rules` can set other values for some of them. Thresholds that only alert rules use are in `rule_settings`.
"""

# Headroom: of the memory that a run uses and can still allocate, the part that it can still allocate.
NEAR_OUT_OF_MEMORY = 0.05  # ratio, critical pressure
LITTLE_MEMORY = 0.1  # ratio, warning pressure
# Time until the OOM forecast.
OUT_OF_MEMORY_EXPECTED_SECONDS = 3600.0  # alert
OUT_OF_MEMORY_AHEAD_SECONDS = 600.0  # warning pressure
OUT_OF_MEMORY_SOON_SECONDS = 60.0  # critical pressure
# Degrees Celsius left before the GPU throttles.
NEAR_SLOWDOWN = 5.0  # warning pressure
SLOWDOWN = 0.0  # critical pressure
SLOWED = 0.1  # ratio of time throttled by heat or the power brake
INPUT_BOUND = 0.5  # ratio of step time spent waiting for input
IDLE_SECONDS = 1800.0  # a GPU allocated and idle: longer than compiling, validation or a checkpoint
# Time for which an event is reported.
DIED_SECONDS = 300.0  # end of a run
ERROR_SECONDS = 600.0  # out-of-memory error of a run
OOM_END_SECONDS = 60.0  # from a run's out-of-memory error to an end by it: one problem, not two
MEMORY_ERRORS_SECONDS = 3600.0  # uncorrected memory error
XID_SECONDS = 3600.0  # XID: nothing reports when its cause is fixed
THROTTLED_SECONDS = 600.0  # throttling, for the fitness of a GPU
LOST_SECONDS = 1800.0  # data dropped or refused by the daemon
# Age at which a poll is stale: this many intervals, but at least this many seconds.
STALE_POLLS = 3.0
STALE_POLL_SECONDS = 60.0
