"""Shim (loop side, above the client): verl's resource pools, the actor's without accelerators.

Imports verl and ray.
"""

from __future__ import annotations

from verl.single_controller.ray import RayResourcePool, ResourcePoolManager

GLOBAL_POOL = "global_pool"


class RemotePools(ResourcePoolManager):
    """As verl's, but the pool of the forwarding worker asks for one CPU and no accelerator; pools
    of reward models keep theirs."""

    def create_resource_pool(self) -> None:
        """Creates the local pool here and the others as verl does."""
        local = self.resource_pool_spec.pop(GLOBAL_POOL)
        try:
            super().create_resource_pool()
        finally:
            self.resource_pool_spec[GLOBAL_POOL] = local
        self.resource_pool_dict[GLOBAL_POOL] = RayResourcePool(
            process_on_nodes=local, use_gpu=False, max_colocate_count=1, name_prefix=GLOBAL_POOL
        )
