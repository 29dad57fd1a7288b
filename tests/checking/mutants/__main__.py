"""Makes one small mistake at a time in a copy of the checkout, and runs the tests nearest to it:
`PYTHONPATH=tests python -P -m checking.mutants --layer pointwise`.

Each line says which test caught the mistake, or that it survived, which is a hole in the tests unless the table says
why. `--draw 10 --seed "$(git rev-parse HEAD)"` tries a few, others for each commit.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from checking.mutants.table import Mutant, drawn, load
from checking.mutants.workspace import Outcome, Workspace

_REMEDIES = {
    "survived": "No test noticed these. Write one that does, or say in the table's row why none can (`survives`); then "
    "try again: PYTHONPATH=tests python -P -m checking.mutants",
    "can't be tried": "These have to be made to fit the code, in tests/checking/mutants",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a mistake survived that the table does not explain, or can't be made."""
    table = load()
    layers = list(dict.fromkeys(one.layer for one in table))
    parser = argparse.ArgumentParser(prog="checking.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mistakes; all, if none is named")
    parser.add_argument("--layer", choices=layers, action="append", help="of this layer alone; may be repeated")
    parser.add_argument("--draw", type=int, metavar="N", help="N of them, by a hash of --seed")
    parser.add_argument("--seed", default="", help="a text, such as the commit's hash")
    parser.add_argument("-n", "--workers", type=int, default=1, help="how many to try at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of each")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--report", action="store_true", help="run all tests of each, and say which files caught none")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - {one.name for one in table}):
        parser.error(f"there is no {', '.join(unknown)}; --list says what there is")
    chosen = [one for one in table if not given.names or one.name in given.names]
    chosen = [one for one in chosen if not given.layer or one.layer in given.layer]
    if given.draw is not None:
        chosen = drawn(chosen, given.draw, given.seed)
    if given.list:
        for one in chosen:
            print(f"{one.layer:12} {one.name:44} {one.note}")
        return 0
    outcomes = _outcomes(chosen, given.workers, given.timeout, all_failures=given.report)
    _summarize(layers, outcomes)
    if given.report:
        _report(outcomes)
    wrong = [one for one in outcomes if one.error or not (one.caught or one.mutant.survives)]
    for name, text in _REMEDIES.items():
        if some := [one.mutant.name for one in wrong if _verdict(one) == name]:
            print(f"{text}: {' '.join(some)}")
    return int(bool(wrong))


def _outcomes(chosen: Sequence[Mutant], workers: int, timeout: float, *, all_failures: bool) -> list[Outcome]:
    """Tries them, and prints a line for each as it ends."""
    found = []
    with tempfile.TemporaryDirectory(prefix="jaxdnn-mutants-") as folder:
        workspace = Workspace(Path(folder))
        with ThreadPoolExecutor(workers) as pool:
            waiting = [pool.submit(workspace.run, one, timeout, all_failures=all_failures) for one in chosen]
            try:
                for future in as_completed(waiting):
                    found.append(future.result())
                    print(_line(found[-1]), flush=True)
            finally:  # interrupted, those that run are waited for, and no other begins
                pool.shutdown(cancel_futures=True)
    return found


def _line(outcome: Outcome) -> str:
    mutant = outcome.mutant
    if outcome.error:
        said = f"CAN'T BE TRIED: {outcome.error}"
    elif outcome.caught:
        more = f" and {len(outcome.caught) - 1} more" if len(outcome.caught) > 1 else ""
        stale = "; the table says that it survives" if mutant.survives else ""
        said = f"caught by {outcome.caught[0]}{more}{stale}"
    elif mutant.survives:
        said = f"survived, as it may: {mutant.survives}"
    else:
        said = f"SURVIVED {', '.join(mutant.tests)}: {mutant.note}"
    return f"{mutant.layer}/{mutant.name} ({outcome.seconds:.1f} s) {said}"


def _summarize(layers: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    """Prints how many were caught in each layer."""
    for layer in layers:
        own = [one for one in outcomes if one.mutant.layer == layer]
        counts = Counter(_verdict(one) for one in own)
        seconds = sum(one.seconds for one in own)
        if own:
            text = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
            print(f"{layer}: {text}, in {seconds:.0f} s")


def _verdict(outcome: Outcome) -> str:
    if outcome.error:
        return "can't be tried"
    if outcome.caught:
        return "caught"
    return "survived, explained" if outcome.mutant.survives else "survived"


def _report(outcomes: Sequence[Outcome]) -> None:
    """Prints the files that were run, and caught nothing. A folder counts by the files in it that did."""
    ran = {test.split("::")[0] for one in outcomes for test in one.mutant.tests}
    caught = {re.split("::| ", test)[0] for one in outcomes for test in one.caught}
    idle = [test for test in sorted(ran) if not any(one == test or one.startswith(f"{test}/") for one in caught)]
    print("caught nothing:", ", ".join(idle) or "none")


if __name__ == "__main__":
    sys.exit(main())
