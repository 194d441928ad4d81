"""A page that shows the fleet, what runs, what waits and why: `gangq web`, or mounted in another ASGI app.

Layers: `queries` (each page and what it reads), `timeline` (rows to SVG), `pages` (routes and templates), `live`
(LISTEN to events).

How an open page follows: in page.html, htmx opens one stream to /live for the tab (`#live`). `live.Live` has one
connection that listens for all streams, and sends each the event `changed` after a change. The event triggers the
`hx-get` of `<main>`, which asks for the page's own path again. `pages._page` then renders only `<main>`, and htmx
morphs it into the page. A page without `live=True` has neither `#live` nor `hx-get`: it stays as it is.
"""

from gangq.web.pages import asgi

__all__ = ["asgi"]
