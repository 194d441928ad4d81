"""A page that shows the fleet, what runs, what waits and why: `gangq web`, or mounted in another ASGI app.

Layers: `queries` (what is read), `timeline` (rows to SVG), `pages` (routes and templates), `live` (LISTEN to events).
"""

from gangq.web.pages import asgi

__all__ = ["asgi"]
