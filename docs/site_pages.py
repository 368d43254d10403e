"""Pages of the site that stand at the repository's root, where GitHub shows them: a hook of mkdocs."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds them, with links as they are within docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        text = text.replace("](docs/", "](").replace("](examples/", "](../examples/")
        for other, its_page in PAGES.items():
            text = text.replace(f"]({other})", f"]({its_page})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links into the source are names there; pages of the root are the site's."""
    for source, page in PAGES.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})")
    return re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Docstrings' roles (:class:`Name`) are for editors."""
    return re.sub(r":(?:class|meth|func|data|attr|mod):(?=\s*<code)", "", html)
