"""All pictures of docs/pictures: `python tools/pictures`; the first run takes 15 minutes.

Needs Prometheus, promtool, node, npm, Chromium and pngquant; see `make pictures`.
"""

import dashboard_pictures
import page_pictures
import situation_pictures

dashboard_pictures.draw_all()
page_pictures.take_for_docs()
situation_pictures.take_all()
