"""The page docs/skyrl-configuration.md, from the shim's own tables; run as a program, it writes it.

python tests/skyrl/skyrl_configuration_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a program

import configuration_pages

from shims.skyrl.keys import TABLE
from shims.skyrl.options import PATH, Options

PAGE = Path(__file__).parents[2] / "docs" / "skyrl-configuration.md"

HEAD = f"""\
# SkyRL's configuration, key by key

What becomes of every key of SkyRL 0.4.0's configuration where [the shim](skyrl.md) trains. \
`python tests/skyrl/skyrl_configuration_page.py` writes this page from the tables that the shim \
itself reads (`shims/skyrl/keys.py`); one test compares the two, another compares the tables with \
SkyRL's own dataclasses, so that a key that SkyRL adds or drops is noticed.

* **mapped**: the shim carries it over.
* **SkyRL**: SkyRL itself acts on it, as with any engine.
* **irrelevant**: no value of it changes what is trained, sampled or saved here.
* **only** and **not**: every other value, or these values, are refused at start-up by the key's \
own name, all in one error.

A key that SkyRL itself declares and that has no row, of another version, is refused too where it \
is set away from its default. Keys of sections that you wrote yourself, as for SkyRL's \
`make_config`, are your own.

## Options of the shim
Under `{PATH}`. SkyRL's parser checks that a key is there, the shim checks its value.

| option | type | default | meaning |
|---|---|---|---|
"""

#: sections of the page: (title, prefix of its keys)
SECTIONS = (
    ("Algorithm", "trainer.algorithm"),
    ("Policy", "trainer.policy"),
    ("Reference", "trainer.ref"),
    ("Critic", "trainer.critic"),
    ("Trainer", "trainer"),
    ("Inference engine", "generator.inference_engine"),
    ("Generator", "generator"),
    ("The rest", ""),
)


def page() -> str:
    """The whole page."""
    return configuration_pages.page(HEAD, Options, TABLE, SECTIONS, "SkyRL")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
