# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the host has, and what Placement shows of it.

============  ==============================================================
devices       the only owner of the state of devices: one lock, one table of
              transitions
cards         one card, one worker, one time limit
scanner       asks the drivers, card by card; hears of changes
providers     pure: devices and claims -> resource providers
tree          resource providers -> Nova's provider tree
============  ==============================================================

Nothing here imports Nova. The store of claims is handed in.
"""

from collections.abc import Callable, Iterable, Mapping
import threading

from nova_accel.drivers import base
from nova_accel.inventory import cards as card_calls
from nova_accel.inventory import providers as provider_rules
from nova_accel import model
from nova_accel import request

Provider = provider_rules.Provider


class Inventory:
    """The devices of one compute host.

    Every method is safe to call from any thread. No method waits for a card
    that hangs, except the first time, and then for one time limit.
    """

    def __init__(self, drivers: Mapping[str, base.AcceleratorDriver], store,
                 taken_elsewhere: Callable[[model.Device], str]
                 = lambda device: ''):
        """
        :param drivers: by name, in the order of [accel] enabled_drivers. The
            first driver that finds a device has it.
        :param store: attach.claims.ClaimStore.
        :param taken_elsewhere: says which of Nova's own options has a device
            as well, as a clause: '0000:3b:00.1 is matched by [pci]
            device_spec'; '' when none has. It is called by the worker of the
            card, under its time limit, and may read the host. Such a device
            is fenced, and logged once as an ERROR.
        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        #: held while a handle is chosen and claimed
        self.claiming = threading.Lock()
        #: runs every call of a driver about one card
        self.cards: card_calls.Cards
        raise NotImplementedError

    # The devices

    @property
    def devices(self) -> dict[str, model.Device]:
        """A snapshot by address. health is what counts: of the driver's word
        and our fences. Do not change the dict."""
        raise NotImplementedError

    def find(self, address: str, index: int | None,
             ) -> tuple[model.Device, model.Region | None]:
        """A device for a NEW claim, and its region if index is not None.

        :raises DeviceUnavailable: it is not there, or it or its region is
            quarantined or gone.
        """
        raise NotImplementedError

    def find_held(self, address: str, index: int | None,
                  ) -> tuple[model.Device, model.Region | None]:
        """A device for a server that holds it, and its region if any.

        Quarantine does not matter while the card answers. A card that is not
        well is asked, under its time limit ([accel] discovery_timeout).

        :raises DeviceUnavailable: it is gone, its card hangs, or it does not
            answer.
        """
        raise NotImplementedError

    def driver_of(self, device: model.Device) -> base.AcceleratorDriver:
        """:raises DeviceUnavailable: its driver is not enabled any more."""
        raise NotImplementedError

    def prepares_every_handle(self, device: model.Device) -> bool:
        """Whether prepare() and release() are called for each handle of it,
        also for those that are not made on demand."""
        raise NotImplementedError

    def guest_can_reprogram(self, address: str, index: int | None) -> bool:
        """Whether a guest can change what the region carries unseen."""
        raise NotImplementedError

    # What regions carry

    def begin_programming(self, address: str, index: int) -> None:
        """Note durably that nobody knows what the region carries.

        Call it before the hardware is touched. Until programmed() or
        programming_failed() what scans say of the card is discarded.

        :raises IllegalTransition: the region is being programmed already.
        :raises DeviceUnavailable: there is no such region.
        :raises AcceleratorsUnavailable: the store cannot be written; nothing
            has changed.
        """
        raise NotImplementedError

    def programmed(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        """Note durably what was programmed and read back.

        :raises IllegalTransition: the region is not being programmed.
        :raises AcceleratorsUnavailable: the store cannot be written; the
            region ends as unknown.
        """
        raise NotImplementedError

    def programming_failed(self, address: str, index: int,
                           report: bool) -> None:
        """End a programming that did not succeed.

        :param report: True when the call of the driver has ended: the card is
            scanned, and the driver says what is left in the region. False
            when it may still run (DeviceTimeout): the content stays unknown
            until the region is programmed again. The card is fenced by itself
            as long as the call runs.
        :raises IllegalTransition: the region is not being programmed.
        """
        raise NotImplementedError

    def forget(self, address: str, index: int) -> None:
        """A guest may have changed the region: drop what is known of it.

        The next scan says what it carries; call scan(addresses=[address])
        once the guest has given the card back.
        """
        raise NotImplementedError

    def set_loaded(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        """Note durably what a region turned out to carry without programming:
        an image whose function is there already.

        :raises IllegalTransition: the region is being programmed.
        """
        raise NotImplementedError

    # Scans

    def configure(self) -> None:
        """Have all drivers configure their devices, side by side.

        Waits for half of [accel] discovery_timeout at most; the first scan()
        has the rest of it. A driver that takes longer goes on, and is scanned
        when it has ended.

        :raises ConfigurationError: a driver cannot read its options.
        """
        raise NotImplementedError

    def scan(self, names: Iterable[str] | None = None,
             addresses: Iterable[str] | None = None) -> None:
        """Ask the drivers, each card by itself, all under one time limit.

        What raises or does not answer in time is fenced with what was known
        of it; the others are as their drivers say. Errors are logged, never
        raised.

        :param names: of the drivers to ask which devices they have; by
            default all.
        :param addresses: look at these cards only, and not for others.
        """
        raise NotImplementedError

    def invalidate_scan(self, address: str) -> None:
        """Discard results of scans of this card that began before now."""
        raise NotImplementedError

    def check_configuration(self) -> None:
        """At start, after the first scan. Logs rules without effect.

        :raises ConfigurationError: two drivers find the same device, one of
            Nova's options has it as well, or an option cannot be read.
        """
        raise NotImplementedError

    def watch(self, kernel) -> None:
        """Look again soon after the kernel says that a device came or went.

        :param kernel: nova_accel.host.kernel.Kernel or a simulated one.
        """
        raise NotImplementedError

    def scan_if_due(self) -> None:
        """Look in the background, each [accel] discovery_interval, which
        drivers and cards have changed, and scan those."""
        raise NotImplementedError

    def recover(self, in_use: Callable[[str], bool] = lambda address: False,
                ) -> None:
        """Have drivers bring back quarantined regions of unused cards.

        Once for each reason. Cards on which a server has a claim are left
        alone.

        :param in_use: whether a card is used although no claim says so.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop listening and looking."""
        raise NotImplementedError

    # What Placement shows

    @property
    def node(self) -> str | None:
        """The name of the compute node that Nova told last."""
        raise NotImplementedError

    def providers(self) -> dict[str, Provider]:
        """Our providers by uuid, parents before children, of the node that
        Nova told last; {} before update_tree() was called."""
        raise NotImplementedError

    def providers_of(self, node: str, root_uuid: str) -> dict[str, Provider]:
        """providers() of any node, as nova-accel discover prints them."""
        raise NotImplementedError

    def update_tree(self, tree, node: str,
                    in_use: Callable[[str], bool]) -> None:
        """Make Nova's provider tree show our devices; touch nothing else.

        An error of the store is logged once and leaves the tree as it is.

        :param tree: nova.compute.provider_tree.ProviderTree of the host.
        :param in_use: whether anything is allocated from a provider uuid;
            asked only before something would be taken away.
        """
        raise NotImplementedError

    def to_publish(self, provider_uuid: str, inventory: Mapping[str, Mapping],
                   traits: Iterable[str], in_use: Callable[[str], bool],
                   ) -> tuple[dict[str, dict] | None, set[str]]:
        """What to write to Placement at once, beside Nova's report.

        Write the inventory first, then the traits, each only where it is not
        there already.

        :param inventory: of the provider in Placement now, by class.
        :param traits: of the provider in Placement now.
        :returns: (inventory or None when it has not to change, traits).
        :raises KeyError: we have no such provider.
        :raises AcceleratorsUnavailable: the store cannot be used.
        """
        raise NotImplementedError

    def allocated(self, allocations: Mapping[str, Mapping] | None,
                  mine: Iterable[tuple[str, int | None]] = (),
                  ) -> list[request.Allocation]:
        """The part of an instance's allocations that is ours.

        :param allocations: ``{provider uuid: {'resources': {class: n}}}``.
        :param mine: (address, region index) that count as unused, because the
            instance itself has claims on them.
        """
        raise NotImplementedError
