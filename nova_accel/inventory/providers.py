# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices and claims -> resource providers. Pure: no I/O, no state."""

from collections.abc import Mapping
import dataclasses


@dataclasses.dataclass(frozen=True)
class Provider:
    """One resource provider of ours and what stands behind it."""

    uuid: str
    name: str
    #: name of the node, or uuid of the device's provider
    parent: str
    address: str
    #: None for the provider of the whole device
    region_index: int | None
    #: resource class -> total
    inventory: Mapping[str, int]
    #: what we say of it now
    traits: frozenset[str]
    #: nothing of it may be given to anybody: reserved = total
    fenced: bool = False
    #: ours, of a state that it is not in now
    retired_traits: frozenset[str] = frozenset()
    #: its inventory depends on what is in use
    dynamic_inventory: bool = False
