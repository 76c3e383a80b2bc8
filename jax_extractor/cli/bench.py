"""jax-extractor bench SUITE"""

import importlib

from jax_extractor.cli.arguments import parse
from jax_extractor.errors import UsageError

#: Each suite is a module of `jax_extractor.bench` with a dataclass `Options` and `run(options)`.
SUITES = {
    "extraction": "every method of the extraction sum beside its peers",
    "talking-heads": "attention and talking heads, plain and blocked, beside their peers",
    "decode": "microseconds a token, streaming beside recomputing",
    "training": "an optimizer step of a language model with each mixer",
}


def run(arguments: list[str]) -> None:
    """Runs the suite that the first argument names."""
    names = ", ".join(SUITES)
    if arguments[:1] in (["-h"], ["--help"]):
        print("usage: jax-extractor bench SUITE …   (--help tells its options)\n")
        print("\n".join(f"  {name:<14} {line}" for name, line in SUITES.items()))
        return
    if not arguments or arguments[0] not in SUITES:
        given = f"unknown suite {arguments[0]!r}" if arguments else "bench needs a suite"
        raise UsageError(f"{given}: choose one of {names}")
    suite = importlib.import_module(f"jax_extractor.bench.{arguments[0].replace('-', '_')}")
    suite.run(parse(suite.Options, arguments[1:], prog=f"bench {arguments[0]}"))
