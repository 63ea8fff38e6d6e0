"""A small web site with pleasant and hostile pages, served by a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SHOP = """<title>Shop</title><h1>Shop</h1>
<a href="/item">A lamp</a> <a href="/item" target="_blank">A lamp in a new tab</a>
<form action="/search"><input name="q" aria-label="Search"><button>Go</button></form>
<select aria-label="Color"><option>red</option><option>green</option></select>
<output id="chosen"></output>
<iframe srcdoc="<button onclick='this.textContent=&quot;pressed&quot;'>Inner</button>"></iframe>
<div style="height: 3000px"></div><a href="/item">Far down</a>
<script>
document.querySelector('select').onchange = event => {
  document.getElementById('chosen').textContent = 'chose ' + event.target.value;
};
</script>"""
PAGES = {
    "/": SHOP,
    "/item": "<title>Lamp</title><h1>Lamp</h1><p id=price>12.50</p><a href='/'>Back</a>",
    "/visits": """<title>Visits</title><p id=count></p><script>
        localStorage.n = Number(localStorage.n || 0) + 1; document.cookie = 'n=' + localStorage.n;
        document.getElementById('count').textContent = `visit ${localStorage.n} ${document.cookie}`</script>""",
    "/alert": "<title>Alert</title><button onclick=\"alert('Boo ' + confirm('Sure?'))\">Press</button>",
    "/alerts": "<title>Alerts</title><button onclick='for (;;) alert(1)'>Press</button>",
    "/hang": "<title>Hang</title><button onclick='for (;;);'>Press</button>",
    "/unload": """<title>Unload</title><input aria-label=Name><script>
        onbeforeunload = event => { event.preventDefault(); event.returnValue = 'stay'; };</script>""",
    "/popups": "<title>Popups</title>"
    "<button onclick=\"for (let i = 0; i < 30; i++) window.open('/item')\">Press</button>",
    "/closes": "<title>Closes</title><button onclick='window.close()'>Press</button>",
    "/loop": "<title>Loop</title><script>location.href = '/loop?' + Math.random()</script>",
    "/title": "<script>document.title = 'x'.repeat(5e6)</script><p>Small</p>",
    "/many": """<title>Many</title><p>First</p><script>
        for (let i = 0; i < 60000; i++) document.body.append(document.createElement('i'));</script>""",
    "/long": "<title>Long</title>"
    + "".join(f"<p>Paragraph {n} of a long page.</p>" for n in range(2000)),
    "/grows": """<title>Grows</title><script>
        setInterval(() => document.body.append(document.createElement('p')), 1)</script>""",
    "/file": """<title>File</title><p id=out>nothing</p><iframe src="file:///etc/passwd"></iframe><script>
        fetch('file:///etc/passwd').then(r => r.text()).catch(() => 'refused').then(t => out.textContent = t);
        </script><button onclick="window.open('file:///etc/passwd'); location.href = 'file:///etc/passwd'">Press</button>""",
    "/outside": """<title>Outside</title><p id=out>waiting</p><script>
        const find = url => fetch(url, {mode: 'no-cors'}).then(r => 'reached').catch(() => 'failed');
        const socket = url => new Promise(done => { const one = new WebSocket(url);
          one.onopen = () => done('reached'); one.onerror = () => done('failed'); });
        Promise.all([find('OTHER'), find('http://10.255.255.1/'), find('/to-other'), socket('OTHER_WS')])
          .then(all => document.getElementById('out').textContent = all.join(' '));</script>""",
    "/tampered": """<title>Tampered</title><p>Visible</p><script>
        window.MutationObserver = Element.prototype.getBoundingClientRect = document.getElementsByTagName =
          Document.prototype.getElementsByTagName = () => { throw 1 };
        Object.defineProperty(Document.prototype, 'title', {get: () => 'forged'});</script>""",
    "/links": "<title>Links</title>"
    + "".join(
        f"<a href='{to}'>{name}</a> "
        for name, to in (("Item", "/item"), ("Broken", "/status/502"), ("Cut", "/cut"))
    )
    + "<a href='/item' target=_blank>New tab</a><form action='/search'><input name=q aria-label=Search></form>",
    "/download": "<title>Download</title><a href='/data.bin'>Data</a>",
    "/upload": "<title>Upload</title><input type=file aria-label=File>",
}


class Site:
    """The server, and what it was asked for."""

    def __init__(self, port: int = 0) -> None:
        self.asked: list[str] = []
        self.status: int | None = None
        """What all pages answer with, if not as usual."""
        self.other = ""
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                parts = urlsplit(self.path)
                if site.status is not None or parts.path.startswith("/status/"):
                    self.send_error(site.status or int(parts.path.rpartition("/")[2]))
                    return
                if parts.path == "/cut":
                    self.close_connection = True
                    return
                if parts.path == "/to-other":
                    self.send_response(302)
                    self.send_header("Location", site.other)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if parts.path == "/search":
                    body = f"<title>Results</title><p>Results for {parse_qs(parts.query)['q'][0]}</p>"
                elif parts.path == "/data.bin":
                    self._send(b"x" * 1000, "application/octet-stream")
                    return
                elif parts.path.startswith("/rest/"):
                    self._send(json.dumps(site.api(self.path)).encode(), "application/json")
                    return
                elif parts.path not in PAGES:
                    self.send_error(404)
                    return
                else:
                    body = PAGES[parts.path].replace("OTHER_WS", site.other.replace("http", "ws"))
                    body = body.replace("OTHER", site.other)
                self._send(f"<!doctype html>{body}".encode(), "text/html; charset=utf-8")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._send(json.dumps("a token").encode(), "application/json")

            def _send(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def api(self, path: str) -> Any:
        """A shop's REST interface, as far as WebArena's helper functions use it."""
        if "/orders" in path:
            return {"items": [{"increment_id": "000000190"}]}
        return [
            {"nickname": "Ann"},
            {"nickname": "Bo", "ratings": [{"rating_name": "Rating", "percent": 80}]},
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def running_site() -> Iterator[Site]:
    site = Site()
    try:
        yield site
    finally:
        site.close()
