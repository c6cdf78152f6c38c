"""Draws the diagram of docs/design.md, which the site shows in place of its source.

    npm install --prefix /tmp/mermaid mermaid@11
    python docs/site/diagram.py /tmp/mermaid/node_modules/mermaid/dist/mermaid.min.js

Needs Chromium.  GitHub draws the source itself.  The site fetches nothing, so it has the picture.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hooks import DIAGRAM, PICTURE
from picture import NAMES

DOCS = Path(__file__).resolve().parents[1]
PAGE = """<body><script src="{library}"></script><script>
mermaid.initialize({{startOnLoad: false, fontFamily: "sans-serif"}});
mermaid.render("diagram", {source}).then(({{svg}}) => {{
  document.body.innerHTML = svg;
  document.querySelector("svg").style.background = "white";
  document.body.textContent = new XMLSerializer().serializeToString(document.querySelector("svg"));
}});
</script></body>"""


def main() -> None:
    library = Path(sys.argv[1]).resolve().as_uri()
    source = DIAGRAM.findall((DOCS / "design.md").read_text(encoding="utf-8"))[0]
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        sys.exit(f"No Chromium: none of {', '.join(NAMES)} is in PATH.")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(PAGE.format(library=library, source=json.dumps(source)), encoding="utf-8")
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        words += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=30000", page.as_uri()]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
    text = done.stdout.partition("<body>")[2].partition("</body>")[0]
    for sign, name in (("<", "&lt;"), (">", "&gt;"), ("&", "&amp;")):
        text = text.replace(name, sign)
    (DOCS / PICTURE).write_text(text.strip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
