# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The base of the parts that make up a simulated kernel."""

import contextlib
import dataclasses
import typing

from nova_accel.sim import card

#: what the cards and the kernel remember, see SimulatedKernel
State = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Host:
    """The description of a host."""

    iommu: bool
    #: the parameter of the module vfio_pci
    disable_denylist: bool
    #: of physical addresses
    address_bits: int
    #: whether VFIO can report what a device has written
    iova_bitmap: bool
    #: whether the kernel has iommufd, and an IOMMU of Intel logs what devices
    #: write
    iommufd: bool
    #: KiB of a huge page -> how many were reserved on each NUMA node
    #: (hugetlbpage.rst of Linux)
    huge_pages: dict[int, list[int]]
    #: PCI address of the physical function -> card
    cards: dict[str, card.Card]
    #: those of cards whose state changes as time passes
    timed: dict[str, card.Card] = dataclasses.field(default_factory=dict)


class Operations:
    """What SimulatedKernel provides for the operations of a kind of cards."""

    #: the description
    path: str

    def _look(self) -> tuple[Host, State]:
        """Return the present description and state; do not change them."""
        raise NotImplementedError

    def _update(self) -> contextlib.AbstractContextManager[
            tuple[Host, State]]:
        """Lock the state for a change; kept unless the caller raises."""
        raise NotImplementedError

    # Any stands for the kind of card that the caller expects
    @staticmethod
    def _owner(host: Host, state: State, function: str,
               ) -> tuple[typing.Any, int | None]:
        """Return (card, number of the VF or None) of a function.

        :raises OSError: ENODEV if no card has this function.
        """
        raise NotImplementedError
