"""The page of a mixture's report: one HTML file with its pictures inside."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from smi import pages
from smi.data.manifest import Manifest
from smi.data.reasons import describe
from smi.data.report import Contents, Packing, rejections, samples, totals
from smi.pages import picture, table

# characters of an example's detail
DETAIL = 300


def page(
    manifest: Manifest, contents: Mapping[str, Contents], packing: Packing | None, images: Mapping[str, bytes]
) -> str:
    """The whole page. `images`: PNG files by name."""

    def drawn(name: str, says: str) -> str:
        return picture(images[name], says) if name in images else ""

    parts = [
        "<h1>Mixture</h1>",
        f"<p>{_headline(manifest)}</p>",
        "<h2>Composition</h2>",
        drawn("composition", "tokens by source and block type, letters by script"),
        _scripts(contents),
        "<h2>Lengths and packing</h2>",
        drawn("lengths", "histogram of the lengths of conversations"),
        f"<p>{_packing(packing)}</p>",
        "<h2>Quotas</h2>",
        drawn("quotas", "what was taken as a share of each quota"),
        _accounts(manifest),
        "<h2>Rows left out</h2>",
        drawn("rejections", "rows left out by reason and source"),
        _rejected(manifest),
        "<h2>Licences and attribution</h2>",
        _licences(manifest),
        "<h2>Made with</h2>",
        _settings(manifest),
    ]
    return pages.page("Mixture", parts)


def _headline(manifest: Manifest) -> str:
    rows, accepted = totals(manifest, "rows"), totals(manifest, "accepted")
    text = (
        f"{rows:,} rows in = {accepted:,} accepted + {rows - accepted:,} left out; {totals(manifest, 'tokens'):,} "
        f"tokens, {totals(manifest, 'supervised_tokens'):,} of them supervised; {len(manifest.shards):,} shards."
    )
    if short := manifest.shortfalls:
        dry = ", ".join(f"{name} is short of {tokens:,} supervised tokens" for name, tokens in short.items())
        text += f' <strong class="short">Sources that ran dry: {escape(dry)}.</strong>'
    return text


def _scripts(contents: Mapping[str, Contents]) -> str:
    rows = []
    for source, content in contents.items():
        letters = sum(content.scripts.values())
        if letters:
            shares = ", ".join(f"{name} {count / letters:.2%}" for name, count in content.scripts.items())
            rows.append((source, letters, shares))
    return table(("source", "letters", "scripts"), rows)


def _packing(packing: Packing | None) -> str:
    if packing is None:
        return "No packing is foreseen: there are no conversations, or one is longer than a pack."
    return (
        f"Best-fit-decreasing packs an epoch into {packing.packs:,} packs of {packing.capacity:,} tokens, "
        f"{packing.fill:.2%} full. Training packs a window at a time and comes close to that."
    )


def _accounts(manifest: Manifest) -> str:
    head = ("source", "rows in", "accepted", "left out", "tokens", "supervised", "quota", "short by", "epochs")
    return table(
        head,
        (
            (
                name,
                account["rows"],
                account["accepted"],
                sum(account["rejected"].values()),
                account["tokens"],
                account["supervised_tokens"],
                "all" if account["quota"] is None else f"{account['quota']:,}",
                account["shortfall"],
                manifest.settings["sources"][name]["epochs"],
            )
            for name, account in manifest.sources.items()
        ),
    )


def _rejected(manifest: Manifest) -> str:
    found = rejections(manifest)
    if not found:
        return "<p>None.</p>"
    counts = table(
        ("reason", "what it means", "rows", "sources"),
        (
            (
                reason,
                describe(reason),
                sum(sources.values()),
                ", ".join(f"{source} {count:,}" for source, count in sources.items()),
            )
            for reason, sources in found.items()
        ),
    )
    examples = table(
        ("reason", "source", "file", "row", "what was found"),
        (
            (reason, source, sample["file"], sample["row"], _shortened(sample["detail"]))
            for reason in found
            for source, sample in samples(manifest, reason)
        ),
    )
    share = ""
    if "near_duplicate" in found:
        near = sum(found["near_duplicate"].values())
        asked = near + totals(manifest, "accepted")
        share = f"<p>Near-duplicates were {near / asked:.1%} of the rows that were held against others.</p>"
    return f"{counts}\n{share}<h3>Examples</h3>\n{examples}"


def _shortened(text: str) -> str:
    return text if len(text) <= DETAIL else f"{text[:DETAIL]}..."


def _licences(manifest: Manifest) -> str:
    return table(
        ("source", "dataset", "revision", "licence", "files"),
        (
            (
                name,
                source["dataset"] or "own files",
                source["revision"] or "",
                source["licence"] or "none stated",
                len(source["files"]),
            )
            for name, source in manifest.settings["sources"].items()
        ),
    )


def _settings(manifest: Manifest) -> str:
    settings = manifest.settings
    duplicates = settings["duplicates"]
    near = f", from {duplicates['threshold']} on" if "threshold" in duplicates else ""
    rows = [
        ("tokenizer", f"{settings['tokenizer']['name']}, {settings['tokenizer']['vocabulary_sha256']}"),
        ("longest document", "any" if (most := settings["compile"]["max_length"]) is None else f"{most:,} tokens"),
        ("seed", str(settings["seed"])),
        ("duplicates", f"{duplicates['by']}{near}"),
        ("held out", ", ".join(file["file"] for file in settings["held_out"]) or "nothing"),
        ("versions", ", ".join(f"{name} {version}" for name, version in settings["versions"].items())),
    ]
    return table(("setting", "value"), rows)
