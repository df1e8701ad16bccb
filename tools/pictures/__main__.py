"""All pictures of docs/pictures: `python tools/pictures`; a quarter of an hour at first, for the day and the renderer.

Needs Prometheus, promtool, node, npm, Chromium and pngquant; see `make pictures`.
"""

import dashboard_pictures
import page_pictures
import situation_pictures

dashboard_pictures.draw_all()
page_pictures.take_for_docs()
situation_pictures.take_all()
