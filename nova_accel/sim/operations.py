# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The base classes of the parts of a simulated kernel."""

import contextlib
import dataclasses
import typing

from nova_accel.sim import card

#: seconds between two polls of a blocking operation
TICK = 0.02
#: the state of cards and kernel, see SimulatedKernel
State = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Host:
    """The description of a host."""

    iommu: bool
    #: whether vfio_pci was loaded with disable_denylist
    disable_denylist: bool
    #: number of physical address bits
    address_bits: int
    #: whether VFIO can report which memory a device has written
    iova_bitmap: bool
    #: whether the kernel has iommufd, and an IOMMU of Intel that logs writes of
    #: devices
    iommufd: bool
    #: KiB of a huge page -> number reserved on each NUMA node (hugetlbpage.rst
    #: of Linux)
    huge_pages: dict[int, list[int]]
    #: PCI address of the physical function -> card
    cards: dict[str, card.Card]
    #: cards whose state changes as time passes
    timed: dict[str, card.Card] = dataclasses.field(default_factory=dict)


class Operations:
    """The methods of SimulatedKernel that the operations of each kind of cards
    need."""

    #: the description
    path: str

    def _look(self) -> tuple[Host, State]:
        """Return the present description and state, for reading only."""
        raise NotImplementedError

    def _update(self) -> contextlib.AbstractContextManager[
            tuple[Host, State]]:
        """Lock the state for changes. Store it if the context succeeds."""
        raise NotImplementedError

    # Any stands for the card class that the caller expects
    @staticmethod
    def _owner(host: Host, state: State, function: str,
               ) -> tuple[typing.Any, int | None]:
        """Return (card, number of the VF or None) of a function.

        :raises OSError: ENODEV if no card has this function.
        """
        raise NotImplementedError
