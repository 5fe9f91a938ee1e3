"""The quickstart's world: an assistant with four small tools, and endless seeded conversations with it.

Every conversation is written by the rules below, so every action and every answer in it can be checked. Tasks are
split by a hash of their tool and arguments: those held out never occur in a training conversation, in any wording.
The tools are real Python functions; the same ones answer a trained model at run time.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from smi.protocol.conversation import Conversation
from smi.protocol.payloads import dumps

HELD_OUT_SHARE = 8  # one task in so many is held out


class ToolError(Exception):
    """A tool's refusal, as the protocol's error observation shows it: a type and a message."""

    def __init__(self, type: str, message: str):
        super().__init__(message)
        self.type = type
        self.message = message


# --- the tools ------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, tuple[str, Callable[[int, int], float]]] = {
    "add": ("plus", lambda a, b: a + b),
    "subtract": ("minus", lambda a, b: a - b),
    "multiply": ("times", lambda a, b: a * b),
    "divide": ("divided by", lambda a, b: a / b),
}
CONVERSIONS: dict[tuple[str, str], Callable[[float], float]] = {
    ("km", "miles"): lambda x: x * 0.621371,
    ("miles", "km"): lambda x: x * 1.609344,
    ("kg", "pounds"): lambda x: x * 2.204623,
    ("pounds", "kg"): lambda x: x * 0.453592,
    ("celsius", "fahrenheit"): lambda x: x * 9 / 5 + 32,
    ("fahrenheit", "celsius"): lambda x: (x - 32) * 5 / 9,
    ("metres", "feet"): lambda x: x * 3.28084,
    ("feet", "metres"): lambda x: x * 0.3048,
}
FIELDS = ("price", "stock", "aisle")
KINDS = ("red", "blue", "green", "small", "large", "old", "steel", "wooden")
THINGS = ("lamp", "rope", "kettle", "ladder", "drill", "tent", "bucket", "mirror", "clock", "candle", "shelf")
ITEMS = tuple(f"{kind} {thing}" for kind in KINDS for thing in THINGS)
ERRANDS = tuple(
    f"{verb} {what}"
    for verb, whats in {
        "call": ("Anna", "Omar", "Mei", "Luis", "Ines", "Yusuf"),
        "water": ("the plants", "the roses"),
        "buy": ("bread", "milk", "stamps", "coffee"),
        "feed": ("the cat", "the dog"),
        "pay": ("the rent", "the plumber"),
        "check": ("the oven", "the mail"),
    }.items()
    for what in whats
)


def _tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "parameters": parameters}


TOOLS = (
    _tool(
        "calculate",
        op={"enum": list(OPERATIONS)},
        a={"type": "integer"},
        b={"type": "integer"},
    ),
    _tool("convert", value={"type": "number"}, **{"from": {"type": "string"}, "to": {"type": "string"}}),
    _tool("lookup", item={"type": "string"}, field={"enum": list(FIELDS)}),
    _tool("remind", text={"type": "string"}, time={"type": "string"}),
)


def _number(value: float) -> int | float:
    """At most two decimals, and none where there are none."""
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


@dataclass
class World:
    """What the tools act on: a store with its own prices, and the reminders set so far."""

    store: dict[str, dict[str, int]]
    reminders: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def random(cls, rng: random.Random) -> "World":
        stocked = rng.sample(ITEMS, k=len(ITEMS) * 9 // 10)
        return cls(
            {
                item: {"price": rng.randint(2, 99), "stock": rng.randint(1, 60), "aisle": rng.randint(1, 20)}
                for item in stocked
            }
        )

    def run(self, name: str, arguments: dict[str, Any]) -> Any:
        """Runs one tool and returns its result as a JSON value.

        Raises:
            ToolError: the tool's own refusal.
            KeyError: no tool of that name.
        """
        return {
            "calculate": self.calculate,
            "convert": self.convert,
            "lookup": self.lookup,
            "remind": self.remind,
        }[name](arguments)

    def calculate(self, arguments: dict[str, Any]) -> int | float:
        if arguments["op"] == "divide" and arguments["b"] == 0:
            raise ToolError("division_by_zero", "cannot divide by zero")
        return _number(OPERATIONS[arguments["op"]][1](arguments["a"], arguments["b"]))

    def convert(self, arguments: dict[str, Any]) -> int | float:
        rule = CONVERSIONS.get((arguments["from"], arguments["to"]))
        if rule is None:
            raise ToolError("unknown_unit", f"no rule from {arguments['from']} to {arguments['to']}")
        return _number(rule(arguments["value"]))

    def lookup(self, arguments: dict[str, Any]) -> int:
        item = self.store.get(arguments["item"])
        if item is None:
            raise ToolError("not_found", "no such item")
        return item[arguments["field"]]

    def remind(self, arguments: dict[str, Any]) -> str:
        self.reminders.append((arguments["time"], arguments["text"]))
        return "saved"


# --- tasks: what a user may want, the call it takes, the sentence that answers it -----------------------------


@dataclass(frozen=True)
class Task:
    """One wish. `clause` is its wording inside a question, `plan` what the model thinks of it."""

    tool: str
    arguments: dict[str, Any]
    clause: str
    plan: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(dumps([self.tool, self.arguments]).encode()).digest()
        return digest[0] % HELD_OUT_SHARE == 0

    def answer(self, result: Any) -> str:
        x = self.arguments
        match self.tool:
            case "calculate":
                return f"{x['a']} {OPERATIONS[x['op']][0]} {x['b']} is {result}."
            case "convert":
                return f"{x['value']} {x['from']} is {result} {x['to']}."
            case "lookup":
                return {
                    "price": f"The {x['item']} costs {result} euros.",
                    "stock": f"We have {result} of the {x['item']}.",
                    "aisle": f"The {x['item']} is in aisle {result}.",
                }[x["field"]]
            case _:
                return f"I will remind you to {x['text']} at {x['time']}."

    def apology(self, error: ToolError) -> str:
        match error.type:
            case "not_found":
                return f"The store has no {self.arguments['item']}."
            case "division_by_zero":
                return "Nothing can be divided by zero."
            case _:
                return "That did not work, even on a second try."


def _calculate(rng: random.Random) -> Task:
    op = rng.choice(list(OPERATIONS))
    a, b = rng.randint(0, 999), rng.randint(0, 999 if op in ("add", "subtract") else 99)
    if op == "divide" and rng.random() < 0.15:
        b = 0
    word = OPERATIONS[op][0]
    clause = rng.choice((f"what is {a} {word} {b}", f"work out {a} {word} {b}", f"what does {a} {word} {b} make"))
    return Task("calculate", {"op": op, "a": a, "b": b}, clause, f"{op} {a} {b}")


def _convert(rng: random.Random) -> Task:
    source, target = rng.choice(list(CONVERSIONS))
    value = rng.randint(1, 400)
    clause = rng.choice(
        (
            f"convert {value} {source} to {target}",
            f"how many {target} is {value} {source}",
            f"what is {value} {source} in {target}",
        )
    )
    return Task("convert", {"value": value, "from": source, "to": target}, clause, f"{value} {source} to {target}")


def _lookup(rng: random.Random) -> Task:
    item, name = rng.choice(ITEMS), rng.choice(FIELDS)
    clause = rng.choice(
        {
            "price": (
                f"how much is the {item}",
                f"what does the {item} cost",
                f"find the price of the {item}",
            ),
            "stock": (f"how many of the {item} are left", f"is the {item} in stock"),
            "aisle": (f"where is the {item}", f"which aisle has the {item}"),
        }[name]
    )
    return Task("lookup", {"item": item, "field": name}, clause, f"{name} of {item}")


def _remind(rng: random.Random) -> Task:
    errand, time = rng.choice(ERRANDS), f"{rng.randint(6, 22):02d}:{rng.choice((0, 10, 15, 20, 30, 45)):02d}"
    clause = rng.choice(
        (
            f"remind me to {errand} at {time}",
            f"set a reminder at {time} to {errand}",
            f"at {time} I must {errand}",
        )
    )
    return Task("remind", {"text": errand, "time": time}, clause, f"{errand} at {time}")


TASKS: dict[str, Callable[[random.Random], Task]] = {
    "calculate": _calculate,
    "convert": _convert,
    "lookup": _lookup,
    "remind": _remind,
}

# --- conversations --------------------------------------------------------------------------------------------

SYSTEM = (
    "You are a helpful assistant.",
    "You help people with numbers, the store and their day.",
    "Use the tools; never guess a result.",
)
SMALL_TALK = (
    ("Hello!", "Hello! What can I do for you?"),
    ("Good morning.", "Good morning! How can I help?"),
    ("Thank you.", "You are welcome."),
    ("Thanks, that helps.", "Glad to hear it."),
)


class SyntheticTools:
    """An endless source of conversations with the tools.

    Args:
        seed: chooses the conversations; one seed always gives the same ones.
        max_questions: a conversation has between one and so many user turns.
    """

    name = "synthetic"

    def __init__(self, seed: int = 0, max_questions: int = 4):
        if max_questions < 1:
            raise ValueError(f"max_questions must be at least 1, not {max_questions}")
        self.seed = seed
        self.max_questions = max_questions

    def conversations(self, epoch: int = 0, held_out: bool = False) -> Iterator[Conversation]:
        """Endless conversations; with `held_out`, of the tasks that training never sees."""
        number = 0
        while True:
            key = f"{self.seed}/{epoch}/{'held-out' if held_out else 'train'}/{number}"
            yield _Writer(random.Random(key), held_out).write(self.max_questions)
            number += 1


class _Writer:
    """Writes one conversation."""

    def __init__(self, rng: random.Random, held_out: bool):
        self.rng = rng
        self.held_out = held_out
        self.world = World.random(rng)
        self.messages: list[dict[str, Any]] = []
        self.calls = 0

    def write(self, max_questions: int) -> Conversation:
        rng = self.rng
        self.thinks = rng.random() < 0.6
        self.tools = rng.sample(TOOLS, k=rng.choice((2, 3, 3, 4, 4)))
        names = [tool["name"] for tool in self.tools]
        self.messages.append({"role": "system", "content": rng.choice(SYSTEM)})
        for _ in range(rng.randint(1, max_questions)):
            dice = rng.random()
            if dice < 0.06:
                question, answer = rng.choice(SMALL_TALK)
                self.messages.append({"role": "user", "content": question})
                self.say("No tool needed.", answer)
            elif dice < 0.13 and len(names) < len(TOOLS):
                missing = rng.choice([name for name in TASKS if name not in names])
                self.ask([self.draw(missing)])
                self.say(f"No tool to {missing}.", "I have no tool for that.")
            else:
                count = rng.choices((1, 2, 3), (0.65, 0.27, 0.08))[0]
                self.solve([self.draw(rng.choice(names)) for _ in range(count)])
        reasoning: dict[str, Any] = {"mode": "disabled"}
        if self.thinks:
            reasoning = {"mode": "adaptive", "effort": "low", "max_tokens": 64}
        return Conversation(messages=self.messages, tools=self.tools, ctrl={"reasoning": reasoning})

    def draw(self, tool: str) -> Task:
        while True:
            task = TASKS[tool](self.rng)
            if task.held_out == self.held_out:
                return task

    def ask(self, tasks: list[Task]) -> None:
        clauses = [task.clause for task in tasks]
        text = clauses[0] if len(clauses) == 1 else ", ".join(clauses[:-1]) + " and " + clauses[-1]
        text = self.rng.choice(("", "", "", "please ", "hi, ")) + text
        self.messages.append({"role": "user", "content": text[0].upper() + text[1:] + self.rng.choice("?.?")})

    def say(self, thought: str, text: str) -> None:
        message = {"role": "assistant", "content": text}
        if self.thinks:
            message["reasoning_content"] = thought
        self.messages.append(message)

    def call(self, tasks: list[Task]) -> list[str]:
        calls = []
        for task in tasks:
            self.calls += 1
            call = {"name": task.tool, "arguments": task.arguments}
            calls.append({"id": f"a{self.calls}", "type": "function", "function": call})
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
        if self.thinks:
            message["reasoning_content"] = ", ".join(task.plan for task in tasks) + "."
        self.messages.append(message)
        return [call["id"] for call in calls]

    def observe(self, call_id: str, result: Any) -> None:
        message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id}
        if isinstance(result, ToolError):
            message |= {"ok": False, "error": {"type": result.type, "message": result.message}}
        else:
            message["content"] = result
        self.messages.append(message)

    def solve(self, tasks: list[Task]) -> None:
        self.ask(tasks)
        answers: list[str] = [""] * len(tasks)
        pending = list(range(len(tasks)))
        for last_try in (False, True):
            ids = self.call([tasks[i] for i in pending])
            busy = []
            observations = []
            for i, call_id in zip(pending, ids, strict=True):
                result: Any
                try:
                    if self.rng.random() < (0.3 if last_try else 0.06):
                        raise ToolError("busy", "try again")
                    result = self.world.run(tasks[i].tool, tasks[i].arguments)
                    answers[i] = tasks[i].answer(result)
                except ToolError as error:
                    result = error
                    answers[i] = tasks[i].apology(error)
                    if error.type == "busy" and not last_try:
                        busy.append(i)
                observations.append((call_id, result))
            if self.rng.random() < 0.3:
                self.rng.shuffle(observations)
            for call_id, result in observations:
                self.observe(call_id, result)
            pending = busy
            if not pending:
                break
        self.say("Done.", " ".join(answers))
