"""Thresholds at which readings mean trouble, declared once for the alert rules, the dashboards and the page.

A color on a dashboard and an alert then never disagree. `gpuwarden rules` takes other values for some of them.
"""

NEAR_OUT_OF_MEMORY = 0.05  # ratio: of the memory a run uses and can still allocate, the part it can still allocate
LITTLE_MEMORY = 0.1  # likewise, where pressure on a run begins; at NEAR_OUT_OF_MEMORY it is critical
OUT_OF_MEMORY_AHEAD_SECONDS = 600.0  # until out-of-memory at the present growth, where pressure begins,
OUT_OF_MEMORY_SOON_SECONDS = 60.0  # and where it is critical
OUT_OF_MEMORY_EXPECTED_SECONDS = 3600.0  # likewise, from which people are told
CLIMB = 0.002  # ratio: of a device's memory; what processes take of it has to climb by that in each
CLIMB_SECONDS = 30.0  # of two such times, to be told from one that has taken all it wants
LEAK = 0.5  # ratio: of a device's memory, in use by processes that grow all the time before that is told
LEAK_SECONDS = 900.0  # for which they have to have grown,
LEAK_STILL_SECONDS = 300.0  # and be growing still
TAKEN = 0.5  # ratio: of what a run could still allocate, taken by others on its device
TAKEN_BYTES = 256.0 * 2**20  # but at least this much
TAKEN_SECONDS = 600.0  # within which
IDLE_SECONDS = 1800.0  # that a GPU is held and does nothing: longer than compiling, validation or a checkpoint
IDLE = 0.01  # ratio: of that time, below which a GPU does nothing
IDLE_SEEN = 0.9  # ratio: of the pages of that time, those that have to show what an owner holds
IDLE_HELD = 0.01  # ratio: of a device's memory that an owner holds, below which it is nobody's
DIED_SECONDS = 300.0  # that the end of a run is told of
PEAK_RISE_SECONDS = 300.0  # a peak that last rose longer ago, or not in as many before, says nothing of what comes
ERROR_SECONDS = 600.0  # that an error of a run is told of
INPUT_BOUND = 0.5  # ratio: of the time of steps, the part in which they wait for their input
INPUT_BOUND_SECONDS = 300.0  # over which that is taken: what a run does once an epoch is no rule
INPUT_BOUND_HOLD_SECONDS = 900.0  # for which it has to be so
NEAR_SLOWDOWN = 5.0  # celsius left before the device slows itself down; there pressure by heat begins,
SLOWDOWN = 0.0  # and here it is critical
NEAR_MEMORY_SLOWDOWN = 5.0  # likewise, by the heat of device memory
SLOWED = 0.1  # ratio: of the time, the part slowed down by heat or the power brake from which it is told of,
SLOWED_SECONDS = 300.0  # over which that is taken
SLOWED_HOLD_SECONDS = 900.0  # for which that has to go on where it is the driver's, gentle slowdown
FAN_NEEDED = 15.0  # celsius left before slowdown at which a fan has to turn; cooler boards may stop theirs
MEMORY_ERRORS_SECONDS = 3600.0  # that uncorrected errors of memory are told of
MANY_RETIRED_PAGES = 60.0  # of the 64 that a board can have
LINK_BUSY = 0.5  # ratio: of the time, the part with a kernel running from which the PCIe link has to be at its best,
LINK_SECONDS = 600.0  # over which that and the errors of links are taken
PCIE_REPLAYS = 8.0  # a minute, the most that NVIDIA's own health checks accept (DCGM)
NVLINK_ERRORS = 1.0  # a minute
NVLINK_SECONDS = 86400.0  # that a link which was up is missed
XID_SECONDS = 3600.0  # that an XID is told of, as nothing says when its cause is mended
STALE_POLLS = 3.0  # poll intervals without a new poll after which the page no longer tells of now,
STALE_POLL_SECONDS = 60.0  # but at least this long
PAUSED_SECONDS = 3600.0  # that a pause may last
LOST_SECONDS = 1800.0  # that is told of what the daemon had to leave out or refuse
