"""The page docs/verl-configuration.md, from the shim's own tables; run as a program, it writes it.

python tests/verl/configuration_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a program

import configuration_pages

from shims.verl.keys import TABLE
from shims.verl.options import PATH, Options

PAGE = Path(__file__).parents[2] / "docs" / "verl-configuration.md"

HEAD = """\
# verl's configuration, key by key

What becomes of every key of verl 0.9.1's configuration where [the shim](verl.md) trains. \
`python tests/verl/configuration_page.py` writes this page from the tables that the shim itself \
reads (`shims/verl/keys.py`); one test compares the two, others compare the tables with verl's own \
YAML and dataclasses, so that a key that verl adds or drops is noticed.

* **mapped**: the shim carries it over.
* **verl**: verl itself acts on it, as with any engine.
* **irrelevant**: no value of it changes what is trained, sampled or saved here.
* **only** and **not**: every other value, or these values, are refused at start-up by the key's \
own name, all in one error.

A key of `actor_rollout_ref` or `algorithm` that has no row is refused too. Elsewhere it is your \
own, for code that you plug into verl; so are keys of `algorithm` with an advantage estimator that \
you registered.
"""

OPTIONS = f"""\
## Options of the shim
Under `{PATH}`, on the command line with a `+`: `+{PATH}.url=http://127.0.0.1:7700`. verl hands \
`engine_kwargs` on as it is, so no schema has to be registered and no `hydra.searchpath` set. \
Types are checked, and an unknown option is refused with the nearest one.

| option | type | default | meaning |
|---|---|---|---|
"""

#: sections of the page: (title, prefix of its keys)
SECTIONS = (
    ("Actor", "actor_rollout_ref.actor"),
    ("Reference", "actor_rollout_ref.ref"),
    ("Rollout", "actor_rollout_ref.rollout"),
    ("Model", "actor_rollout_ref.model"),
    ("Algorithm", "algorithm"),
    ("Trainer", "trainer"),
    ("Data", "data"),
    ("The rest", ""),
)


def page() -> str:
    """The whole page."""
    return configuration_pages.page(HEAD + "\n" + OPTIONS, Options, TABLE, SECTIONS, "verl")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
