"""Renders cases.json with Jinja2 in the environment of the Hugging Face library and writes expected/: run it with
Jinja2 3.1 after a change of a template or a case."""

import datetime
import json
from pathlib import Path

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).parent


class Generation(Extension):
    """A block that changes nothing."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.If(nodes.Const(True), body, [], []).set_lineno(line)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise TemplateError(message)


def render(case):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    now = datetime.datetime.fromtimestamp(case["now"], datetime.timezone.utc)
    environment.globals["strftime_now"] = now.strftime
    template = environment.from_string((HERE / f"{case['template']}.jinja").read_text(encoding="utf-8"))
    return template.render(
        messages=case["messages"],
        tools=case.get("tools"),
        documents=None,
        add_generation_prompt=case.get("add_generation_prompt", False),
        bos_token="<s>",
        eos_token="</s>",
        **case.get("kwargs", {}),
    )


def main():
    for name, case in json.loads((HERE / "cases.json").read_text(encoding="utf-8")).items():
        try:
            text = render(case)
        except TemplateError as error:
            text = f"refused: {error}"
        (HERE / "expected" / f"{name}.txt").write_text(text, encoding="utf-8", newline="")


if __name__ == "__main__":
    main()
