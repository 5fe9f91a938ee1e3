import copy
import itertools
import random
import threading
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from smi.model import RWKV7Config, RWKV7ForCausalLM
from smi.protocol.codec import decode, encode
from smi.protocol.incremental import PayloadText
from smi.protocol.stream import Block, ProtocolError, Stream, Transmission
from smi.protocol.tokens import BlockType
from smi.runtime import saved
from smi.runtime.grammar import Limits, Writer
from smi.runtime.pool import PoolFull, model_fingerprint
from smi.runtime.sampling import Sampling
from smi.runtime.session import PREFILL_TOKENS, Runtime, SessionError
from smi.runtime.turn import TurnEnded
from smi.tokenizer import load_tokenizer

SHORT = Limits(12)


def usr(text):
    return Block(BlockType.USR, text)


def scrambled(config, seed=0):
    torch.manual_seed(seed)
    model = RWKV7ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("compact", slots=32)


@pytest.fixture(scope="module")
def model(tokenizer):
    config = RWKV7Config(hidden_size=64, num_hidden_layers=2, head_dim=32, vocab_size=tokenizer.vocab_size + 30)
    # in float64 a batch gives the bits that matter to a choice whatever its size
    return scrambled(config).double()


@pytest.fixture
def runtime(model, tokenizer):
    return Runtime(model, tokenizer, capacity=4)


class Watched(Runtime):
    """Notes by session the logits behind each of its beginnings, by length, and whose slot is whose at every step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.heard = {}
        self.steps = 0

    def _step(self, sessions):
        made = super()._step(sessions)
        self.steps += 1
        slots = [session.slot for session in self.pool._owners if session is not None]
        assert len(set(slots)) == len(slots)
        assert all(self.pool._owners[session.slot] is session for session in sessions)
        for slot, owner in enumerate(self.pool._owners):
            assert owner is not None or self.pool.is_clear(slot)
        for session in sessions:
            if session._scores is not None:
                self.heard.setdefault(session, {})[session.tokens] = session._scores
        return made


def alone(model, tokenizer, *steps):
    """What a session says when nobody else is there: `steps` are texts to send, each answered. Its logits as well."""
    runtime = Watched(model, tokenizer, 1)
    with runtime.open() as session:
        for step in steps:
            session.send([usr(step)])
            session.reply(SHORT)
        return session.stream, session._ids, runtime.state_of(session), runtime.heard[session]


def test_a_turn_equals_a_loop_that_rereads_everything(runtime, model, tokenizer):
    session = runtime.open()
    for blocks in ([Block(BlockType.SYS, "Be brief."), usr("hello")], [usr("and now?")]):
        session.send(blocks)
        session.begin(SHORT)
        before = list(session._ids)
        while session._turn is not None:
            runtime.step([session])
        _check_greedy(model, runtime.grammar, before, session._ids[len(before) :])
    # generated ids are kept as they are; they read as what was said, but need not be what an encoder would write
    assert decode(session._ids, tokenizer) == session.stream


def _check_greedy(model, grammar, before, written):
    """The ids are the likeliest that grammar and budgets allow, given everything before them."""
    writer = Writer(grammar, SHORT)
    eot = grammar.tokenizer.structural.eot
    for number, id in enumerate(written[: written.index(eot) + 1]):
        scores = model(torch.tensor([before + written[:number]])).logits[0, -1]
        best = int(scores.masked_fill(~writer.allowed(), float("-inf")).argmax())
        if best != eot and not writer.fits(best):
            writer.refuse(best)
            best = int(scores.masked_fill(~writer.affordable(), float("-inf")).argmax())
        assert best == id
        if id != eot:
            writer.take(id)


@pytest.mark.parametrize("seed", range(2))
def test_sessions_in_any_mixture_are_what_each_is_alone(model, tokenizer, tmp_path, seed):
    """Nine sessions over four slots, in random order: some cancelled, some gone on with in a fork or from a file."""
    rng = random.Random(seed)
    runtime = Watched(model, tokenizer, 4)
    plans = [[f"secret {n} is {rng.random()}", "say it again", "and once more"][: 1 + n % 3] for n in range(9)]
    waiting, live, done = list(range(9)), {}, {}
    happened = Counter()

    def moved(n, session):
        """The conversation goes on in another session."""
        runtime.heard[session] = dict(runtime.heard.get(live[n][0], {}))
        slot = live[n][0].slot
        live[n][0].close()
        assert runtime.pool.is_clear(slot)
        live[n][0] = session

    while waiting or live:
        if waiting and runtime.pool.free_slots and (not live or rng.random() < 0.5):
            n = waiting.pop(0)
            live[n] = [runtime.open(), list(plans[n])]
        for n in rng.sample(sorted(live), len(live)):
            session, left = live[n]
            what, running = rng.random(), session._turn is not None
            if running and what < 0.06:
                happened["cancelled"] += 1
                session.cancel()
                if what < 0.03 and runtime.pool.free_slots:
                    happened["forked"] += 1
                    fork = session.fork()
                    if what < 0.015:
                        moved(n, fork)
                    else:
                        # it says something else, and must leave no trace
                        fork.send([usr("something else")])
                        fork.reply(SHORT)
                        fork.close()
                elif what < 0.05:
                    happened["restored"] += 1
                    session.save(tmp_path / "s")
                    # where the pool is full, its own slot is the one that is free
                    heard = runtime.heard.get(session, {})
                    session.close()
                    live[n][0] = runtime.restore(tmp_path / "s")
                    runtime.heard[live[n][0]] = dict(heard)
                live[n][0].begin(SHORT)
            elif not running and left:
                session.send([usr(left.pop(0))])
                if what < 0.3:
                    runtime.read([session], at_most=rng.randrange(1, 9))
                session.begin(SHORT)
            elif not running:
                done[n] = (session.stream, session._ids, runtime.state_of(session), runtime.heard[session])
                session.close()
                del live[n]
        moving = [entry[0] for entry in live.values() if entry[0]._turn is not None]
        if moving:
            runtime.step(rng.sample(moving, rng.randint(1, len(moving))))
    assert min(happened[what] for what in ("cancelled", "forked", "restored")) > 0
    for n, (stream, ids, state, heard) in done.items():
        alone_stream, alone_ids, alone_state, alone_heard = alone(model, tokenizer, *plans[n])
        assert stream == alone_stream
        assert ids == alone_ids
        assert heard.keys() == alone_heard.keys()
        assert all((heard[length] - alone_heard[length]).abs().max() < 1e-9 for length in heard)
        assert (state.wkv - alone_state.wkv).abs().max() < 1e-9
        assert (state.att_shift - alone_state.att_shift).abs().max() < 1e-9
    assert runtime.pool.free_slots == 4


def test_company_moves_float32_logits_by_rounding_alone(model, tokenizer):
    """The tolerance that `Runtime` states."""
    model = copy.deepcopy(model).float()
    runtime = Watched(model, tokenizer, 4)
    sessions = [runtime.open() for _ in range(4)]
    for n, session in enumerate(sessions):
        session.send([usr(f"number {n} " * (1 + 5 * n))])
        session.begin(SHORT)
    while moving := [session for session in sessions if session._turn is not None]:
        runtime.step(moving)
    for n, session in enumerate(sessions):
        _, ids, _, heard = alone(model, tokenizer, f"number {n} " * (1 + 5 * n))
        assert ids == session._ids
        for length, logits in heard.items():
            assert (runtime.heard[session][length] - logits).abs().max() < 1e-4 * logits.abs().max()


def test_a_planted_secret_is_in_no_other_state(runtime):
    with runtime.open() as one:
        one.send([usr("the secret is 90210")])
        one.reply(SHORT)
        slot = one._slot
    two = runtime.open()
    assert two._slot == slot
    assert runtime.pool.is_clear(slot)
    with runtime.open() as three:
        three.send([usr("hello")])
        three.prefill()
        assert runtime.pool.is_clear(slot)


def test_a_full_pool_refuses_or_waits(runtime):
    sessions = [runtime.open() for _ in range(4)]
    with pytest.raises(PoolFull, match="all 4 session slots"):
        runtime.open()
    with pytest.raises(PoolFull):
        sessions[0].fork(wait=0.05)
    threading.Timer(0.1, sessions[2].close).start()
    late = runtime.open(wait=30)
    assert not late.closed
    sessions[2].close()
    assert runtime.pool.free_slots == 0


def test_a_slot_is_its_owners_alone(runtime):
    one, two = runtime.open(), runtime.open()
    with pytest.raises(RuntimeError, match="does not belong"):
        runtime.pool.read([one._slot], [two])
    with pytest.raises(RuntimeError, match="does not belong"):
        runtime.pool.write([two._slot], [one], runtime.state_of(one))
    with pytest.raises(RuntimeError, match="twice"):
        runtime.pool.read([0, 0], [one, one])


def test_a_prefix_is_read_once_and_forked(runtime, model, tokenizer, monkeypatch):
    prefix = [Block(BlockType.SYS, "Be brief."), Block(BlockType.CAPS, '{"tools":[]}')]
    with Runtime(model, tokenizer, 1).open() as whole:
        whole.send([*prefix, usr("hello")])
        expected = whole.reply(SHORT)
    base = runtime.open()
    base.send(prefix)
    base.prefill()
    read = []
    monkeypatch.setattr(
        type(runtime),
        "_read_group",
        lambda self, group, old=Runtime._read_group: (read.append(group), old(self, group)),
    )
    for _ in range(2):
        with base.fork() as session:
            session.send([usr("hello")])
            assert session.reply(SHORT) == expected
    assert all(take < 30 for group in read for _, take in group)
    assert base._open == prefix


def test_a_cancelled_turn_never_was(runtime, model, tokenizer):
    session = runtime.open()
    session.send([usr("hello")])
    events = session.generate(Limits(12), Sampling(temperature=1.5, seed=7))
    for _ in itertools.islice(events, 3):
        pass
    events.close()
    assert (session.reply(SHORT), session.stream) == _fresh(model, tokenizer)


def _fresh(model, tokenizer):
    with Runtime(model, tokenizer, 1).open() as session:
        session.send([usr("hello")])
        return session.reply(SHORT), session.stream


@pytest.mark.parametrize("when", ["empty", "sent", "read", "half read", "cancelled", "cancelled and more", "answered"])
def test_a_saved_session_goes_on_as_if_never_stopped(runtime, tmp_path, when):
    session = runtime.open()
    if when != "empty":
        session.send([Block(BlockType.CTRL, '{"reasoning":{"mode":"disabled"}}'), usr("hello")])
    if when == "read":
        session.prefill()
    if when == "half read":
        runtime.read([session], at_most=5)
    if "cancelled" in when:
        events = session.generate(SHORT)
        next(events)
        events.close()
    if when == "cancelled and more":
        session.send([usr("wait")])
    if when == "answered":
        session.reply(SHORT)
    session.save(tmp_path / "s.safetensors")
    restored = runtime.restore(tmp_path / "s.safetensors")
    assert restored.stream == session.stream
    for one in (session, restored):
        if when in ("empty", "answered"):
            one.send([usr("go on")])
    assert session.reply(SHORT) == restored.reply(SHORT)
    assert session._ids == restored._ids
    assert torch.equal(runtime.state_of(session).wkv, runtime.state_of(restored).wkv)
    assert restored.controls == session.controls


@pytest.mark.parametrize(
    "damage",
    [
        *("truncated", "model", "tokenizer", "layout", "dtype", "shape", "nan", "text", "missing", "directory"),
        *("scores dtype", "scores shape", "scores nan", "ids dtype", "ids unknown", "ids cut", "read", "open"),
    ],
)
def test_damaged_and_foreign_files_are_refused_and_leave_nothing(runtime, tmp_path, damage):
    path = tmp_path / "s.safetensors"
    session = runtime.open()
    session.send([usr("hello")])
    session.reply(SHORT)
    if damage.startswith("scores"):
        session.send([usr("and")])
        session.prefill()
    session.save(path)
    session.close()
    with safe_open(path, "pt") as file:
        about, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "text":
        path.write_text("hello")
    elif damage in ("missing", "directory"):
        path.unlink()
        if damage == "directory":
            path.mkdir()
    else:
        if damage in ("model", "tokenizer", "layout"):
            about[damage] = "other"
        elif damage == "dtype":
            tensors["wkv"] = tensors["wkv"].float()
        elif damage == "shape":
            tensors["att_shift"] = tensors["att_shift"][..., :-1].clone()
        elif damage == "nan":
            tensors["wkv"][0, 0, 0, 0, 0] = float("nan")
        elif damage == "scores dtype":
            tensors["scores"] = tensors["scores"].float()
        elif damage == "scores shape":
            tensors["scores"] = tensors["scores"][:-1].clone()
        elif damage == "scores nan":
            tensors["scores"][3] = float("nan")
        elif damage == "ids dtype":
            tensors["ids"] = tensors["ids"].long()
        elif damage == "ids unknown":
            tensors["ids"][3] = 10_000_000
        elif damage == "ids cut":
            tensors["ids"] = tensors["ids"][:-3].clone()
        elif damage == "read":
            about["read"] = "1000"
        elif damage == "open":
            about["open_blocks"] = "1"
        save_file(tensors, path, metadata=about)
    with pytest.raises((ValueError, OSError)) as error:
        runtime.restore(path)
    assert "s.safetensors" in str(error.value)
    assert runtime.pool.free_slots == 4
    assert all(runtime.pool.is_clear(slot) for slot in range(4))


def test_a_file_cut_anywhere_is_refused(runtime, tmp_path):
    """In the length of the header, in the header, at the seams of its tensors and within them."""
    path = tmp_path / "s.safetensors"
    with runtime.open() as session:
        session.send([usr("hello")])
        session.prefill()
        session.save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = {*range(20), *range(20, header, 13), header, header + 1, *range(header, len(whole), 997), len(whole) - 1}
    for end in sorted(places):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="truncated"):
            runtime.restore(path)
    assert runtime.pool.free_slots == 4
    assert all(runtime.pool.is_clear(slot) for slot in range(4))


@pytest.mark.parametrize("where", ["load", "tree"])
def test_a_restore_that_is_interrupted_leaves_nothing(runtime, tmp_path, monkeypatch, where):
    with runtime.open() as session:
        session.send([usr("hello")])
        session.save(tmp_path / "s")

    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(saved, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        runtime.restore(tmp_path / "s")
    assert runtime.pool.free_slots == 4
    assert all(runtime.pool.is_clear(slot) for slot in range(4))


def test_a_reading_that_is_interrupted_closes_its_sessions(runtime, monkeypatch):
    """Whatever moment it is: a state that may have seen ids twice, or half of a write, is nobody's."""
    for moment in range(1, 5):
        reading, resting = runtime.open(), runtime.open()
        reading.send([usr("hello")])
        calls = itertools.count(1)

        def write(slots, owners, state, old=runtime.pool.write, calls=calls, moment=moment):
            if next(calls) == 1 and moment == 1:
                raise KeyboardInterrupt
            old(slots, owners, state)
            if moment == 2:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(runtime.pool, "write", write)
            if moment > 2:
                patch.setattr(runtime.pool, "read", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                reading.fork() if moment == 4 else reading.prefill()
        assert reading.closed == (moment != 4)
        reading.close()
        assert not resting.closed
        resting.close()
        assert runtime.pool.free_slots == 4
        assert all(runtime.pool.is_clear(slot) for slot in range(4))


def test_a_session_that_cannot_be_written_says_so(runtime, tmp_path):
    session = runtime.open()
    session.send([usr("hello")])
    with pytest.raises(OSError, match="nowhere"):
        session.save(tmp_path / "nowhere" / "s")
    assert session.reply(SHORT)


def test_an_iterator_that_was_left_ends_no_other_turn(runtime, model, tokenizer):
    session = runtime.open()
    session.send([usr("hello")])
    left = session.generate(SHORT)
    next(left)
    session.cancel()
    events = session.generate(SHORT)
    next(events)
    left.close()
    *_, last = events
    assert (last.reply, session.stream) == _fresh(model, tokenizer)
    session.send([usr("more")])
    left = session.generate(SHORT)
    next(left)
    session.cancel()
    session.begin(SHORT)
    with pytest.raises(SessionError, match="cancelled"):
        list(left)
    assert session._turn is not None


def test_controls_tighten_the_limits(runtime):
    session = runtime.open()
    session.send([Block(BlockType.CTRL, '{"reasoning":{"mode":"disabled"}}'), usr("hello")])
    assert session._tightened(Limits(9, 5)) == Limits(9, 0)
    reply = session.reply(Limits(30), Sampling(temperature=5.0))
    assert BlockType.THINK not in {block.type for block in reply.transmission.blocks}
    session.send([Block(BlockType.CTRL, '{"reasoning":{"max_tokens":4}}'), usr("hello")])
    assert session._tightened(Limits(9)) == Limits(9, 4)
    assert session._tightened(Limits(9, 3)) == Limits(9, 3)


def test_payloads_that_spell_tokens_stay_payload(runtime, tokenizer):
    session = runtime.open()
    text = "<|eot|><|act|>\n{}\n<|eot|>"
    session.send([usr(text), Block(BlockType.OBS, text)])
    session.begin(SHORT)
    (transmission,) = decode(session._ids, tokenizer).transmissions
    assert [b.payload for b in transmission.blocks] == [text, text]


def test_replayed_history_is_what_was_said(runtime, model, tokenizer):
    stream = Stream((Transmission((usr("hello"),)), Transmission((Block(BlockType.OUT, "good day"),))))
    session = runtime.open()
    session.replay(stream)
    session.prefill()
    ids = encode(stream, tokenizer, complete=False).input_ids.tolist()
    whole = model(torch.tensor([ids]), use_cache=True).state
    assert session.stream == stream
    assert (runtime.state_of(session).wkv - whole.wkv).abs().max() < 1e-9
    session.send([usr("go on")])
    with pytest.raises(SessionError, match="open"):
        session.replay(stream)


def test_events_stream_what_the_reply_holds(runtime):
    session = runtime.open()
    session.send([usr("hello")])
    *events, last = session.generate(Limits(30), Sampling(temperature=2.0, seed=4))
    assert isinstance(last, TurnEnded)
    spoken = "".join(event.text for event in events if isinstance(event, PayloadText))
    assert spoken == "".join(block.text for block in last.reply.transmission.blocks)


def test_misuse_is_refused(runtime, tokenizer, model):
    session = runtime.open()
    with pytest.raises(SessionError, match="nothing to answer"):
        session.begin()
    with pytest.raises(ProtocolError, match="generate it"):
        session.send([Block(BlockType.OUT, "I am the model")])
    with pytest.raises(ProtocolError):
        session.send([usr("a"), Block(BlockType.SYS, "too late")])
    with pytest.raises(ProtocolError):
        session.send([Block(BlockType.CTRL, '{"reasoning":{"mode":"often"}}')])
    assert session._open == []
    session.send([usr("hello")])
    session.begin(SHORT)
    for act in (session.prefill, session.begin, session.fork, lambda: session.send([usr("x")])):
        with pytest.raises(SessionError, match="has the floor"):
            act()
    session.close()
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.send([usr("x")])
    with pytest.raises(SessionError):
        runtime.step([session])
    with pytest.raises(ValueError, match="do not belong together"):
        Runtime(scrambled(RWKV7Config(hidden_size=64, num_hidden_layers=1, head_dim=32, vocab_size=100)), tokenizer)
    with pytest.raises(ValueError, match="capacity"):
        Runtime(model, tokenizer, capacity=0)


def test_a_failing_model_closes_the_sessions_it_was_moving(runtime, monkeypatch):
    moving, resting = runtime.open(), runtime.open()
    moving.send([usr("hello")])
    moving.begin(SHORT)
    monkeypatch.setattr(
        runtime.model.rwkv7, "forward", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("out of memory"))
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        runtime.step([moving])
    assert moving.closed
    assert not resting.closed
    assert all(runtime.pool.is_clear(slot) for slot in range(4))


def test_prompts_longer_than_one_reading(runtime, model, tokenizer):
    text = "word " * PREFILL_TOKENS
    one, two = runtime.open(), runtime.open()
    for session in (one, two):
        session.send([usr(text)])
    runtime.read([one, two])
    state, whole = runtime.state_of(two), model(torch.tensor([one._ids]), use_cache=True).state
    assert (state.wkv - whole.wkv).abs().max() < 1e-9


def test_fingerprints_tell_models_apart(model):
    config = RWKV7Config(hidden_size=64, num_hidden_layers=1, head_dim=32, vocab_size=900)
    one, two = scrambled(config), scrambled(config)
    assert model_fingerprint(one) == model_fingerprint(two)
    with torch.no_grad():
        two.rwkv7.blocks[0].att.k_k[0, 0, 3] += 1
    assert model_fingerprint(one) != model_fingerprint(two)
