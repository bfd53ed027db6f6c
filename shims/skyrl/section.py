"""Shim (loop side, above the client): `trainer.remote` in the form that SkyRL's parser reads.

Imports SkyRL's configuration. Annotations are evaluated here, unlike elsewhere: SkyRL's parser
reads the types of the fields as they are.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from skyrl.train.config import SkyRLTrainConfig, TrainerConfig, make_config
from skyrl.train.config.config import BaseConfig


@dataclass
class RemoteSection(BaseConfig):
    """`Options` in the form that SkyRL's parser reads; they say what each means."""

    target: str | None = None
    model: str | None = None
    start: str = "base"
    takeover: bool = False
    generation_attempts: int = 3
    in_flight: str = "keep"
    backend: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass
class RemoteTrainerConfig(TrainerConfig):
    """SkyRL's section `trainer` with `trainer.remote`."""

    remote: RemoteSection = dataclasses.field(default_factory=RemoteSection)


def config_class(
    algorithm_class: type | None = None, generator_class: type | None = None
) -> type[SkyRLTrainConfig]:
    """SkyRL's configuration with `trainer.remote`, and with sections of the user's own, as SkyRL's
    `make_config` takes them."""
    trainer_class: type[TrainerConfig] = RemoteTrainerConfig
    if algorithm_class is not None:
        trainer_class = dataclass(
            type(
                "RemoteTrainerConfig",
                (RemoteTrainerConfig,),
                {
                    "__annotations__": {"algorithm": algorithm_class},
                    "algorithm": dataclasses.field(default_factory=algorithm_class),
                },
            )
        )
    made: type[SkyRLTrainConfig] = make_config(
        trainer_cls=trainer_class, generator_cls=generator_class
    )
    return made
