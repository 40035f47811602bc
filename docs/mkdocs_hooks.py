"""What the documentation site has beyond the pages in this folder: see mkdocs.yml.

Its first page is README.md, its last one CHANGELOG.md, and a file of the repository that a page links to has
a page as well. The API pages name what the packages export; mkdocstrings fills them from the docstrings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
PACKAGES = ("delta", "publish", "recstore", "store", "checkpoint", "zch", "errors")
AT_THE_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made."""
    made = {page: (ROOT / source).read_text() for page, source in AT_THE_ROOT.items()}
    made |= {f"api/{name}.md": api_page(name) for name in PACKAGES}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for source in sorted({path for file in files.documentation_pages() for path in linked_sources(file)}):
        files.append(File.generated(config, source_page(source), content=listing(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets links lead to where their targets are in the site."""
    if page.file.src_uri.startswith(("api/", "source/")):
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = in_the_site(repository_path(page.file, link["path"]))
        here = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(target, here or ".") + (link["anchor"] or "")

    prose_and_code = CODE.split(markdown)
    prose_and_code[::2] = [LINK.sub(moved, prose) for prose in prose_and_code[::2]]
    return "".join(prose_and_code)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuses pages for which a browser would fetch something from elsewhere."""
    if found := ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri} is not complete by itself: {found[0]}")
    return output


def repository_path(file: File, link: str) -> str:
    """What a page links to, relative to the repository's root."""
    source = AT_THE_ROOT.get(file.src_uri, f"docs/{file.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def in_the_site(path: str) -> str:
    """Where a file of the repository is in the site, relative to docs/."""
    for page, source in AT_THE_ROOT.items():
        if path == source:
            return page
    return path.removeprefix("docs/") if path.startswith("docs/") else source_page(path)


def linked_sources(file: File) -> list[str]:
    """The files outside of docs/ that a page links to."""
    paths = [repository_path(file, link["path"]) for link in LINK.finditer(file.content_string)]
    return [path for path in paths if in_the_site(path) == source_page(path) and (ROOT / path).is_file()]


def source_page(path: str) -> str:
    """The name of the page that shows a file."""
    return f"source/{path}.md"


def listing(path: str) -> str:
    """A page that shows a file as it is."""
    language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"


def api_page(name: str) -> str:
    """A page of all that a package exports, errors last."""
    module = griffe.load(f"torchrec_ext.{name}", search_paths=[ROOT], allow_inspection=False)
    names = module.exports or [member.name for member in module.classes.values()]
    about = "{ members: false, show_root_heading: false, show_root_toc_entry: false }"
    blocks = [f"# {module.path}", f"::: {module.path}\n    options: {about}"]
    blocks += [f"::: {module.path}.{name}" for name in sorted(names, key=lambda name: name.endswith("Error"))]
    return "\n\n".join(blocks)


class PlainDocstrings(griffe.Extension):
    """Makes Markdown of ``Example::``, which is reStructuredText: one colon."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Is called by Griffe for each object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
