"""Random streams: every block kind, hostile text, and spans of made-up modalities."""

from families import hostile
from hypothesis import strategies as st

from smi.protocol import Block, BlockType, Payload, Side, Span, Stream, TokenNamespace, Transmission

VISION = TokenNamespace("vision", 100_000, 64)
AUDIO = TokenNamespace("audio", 100_064, 16)
ACTION = TokenNamespace("action", 200_000, 256)
NAMESPACES = (ACTION, VISION, AUDIO)


def spans() -> st.SearchStrategy[Span]:
    """A few ids of one of the namespaces."""

    def ids(namespace: TokenNamespace) -> st.SearchStrategy[Span]:
        some = st.lists(st.integers(0, namespace.size - 1), min_size=1, max_size=5)
        return some.map(lambda found: Span(namespace.name, tuple(found)))

    return st.sampled_from(NAMESPACES).flatmap(ids)


def payloads(mixed: bool = True) -> st.SearchStrategy[Payload]:
    """Hostile text, and with `mixed` text and spans in any order."""
    parts = st.lists(st.one_of(spans(), hostile(), st.sampled_from(["", "\n", " "])), max_size=5)
    return st.one_of(hostile(), parts.map(tuple)) if mixed else hostile()


def streams(mixed: bool = True) -> st.SearchStrategy[Stream]:
    """Any stream the grammar allows."""

    def transmission(side: Side) -> st.SearchStrategy[Transmission]:
        types = [kind for kind in BlockType if kind < BlockType.EOT and kind.side is side]
        blocks = st.lists(st.builds(Block, st.sampled_from(types), payloads(mixed)), min_size=1, max_size=4)
        if side is Side.RUNTIME:
            blocks = blocks.map(lambda found: sorted(found, key=lambda block: min(block.type, BlockType.USR)))
        return blocks.map(lambda found: Transmission(tuple(found)))

    either = st.one_of(transmission(Side.RUNTIME), transmission(Side.MODEL))
    return st.lists(either, max_size=4).map(lambda found: Stream(tuple(found)))
