"""How readings look, wherever they are shown: thresholds, dashes, gauges and the words for what is not there."""

from __future__ import annotations

from classic import BAD, Json, good_from

from gpuwarden import thresholds

NO_RUN = "no run reports yet: add the callback GpuWarden() to model.fit, or watch() to a loop"
# The driver tells whole degrees, and Grafana colors from a value on: 5 is the last bad one, 6 the first good one.
MARGIN = thresholds.NEAR_SLOWDOWN + 1
HEADROOM = good_from(thresholds.NEAR_OUT_OF_MEMORY)
DASHED: Json = {"custom__lineStyle": {"fill": "dash", "dash": [8, 6]}}
LIMIT: Json = {"color": {"mode": "fixed", "fixedColor": BAD}, **DASHED}
SIZE: Json = {"color": {"mode": "fixed", "fixedColor": "gray"}, **DASHED}
GAUGE: Json = {"custom__cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}}
COLORED: Json = {"custom__cellOptions": {"type": "color-background", "mode": "basic"}}
SHARE: Json = {"unit": "percentunit", "decimals": 0, "min": 0, "max": 1}
