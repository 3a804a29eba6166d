# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the rooms below virt/ ask of Nova, Placement, Glance and libvirt.

The only door: nova_accel.virt.cloud answers for a real nova-compute, and tests
put a small cloud of their own in its place.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
import contextlib
import typing

from nova_accel.inventory import tree
from nova_accel import model
from nova_accel import request


class Cloud(typing.Protocol):

    def admin_context(self) -> typing.Any:
        """Return a request context of nova-compute itself, without a user's
        token."""

    # Placement

    def allocations(self, context, consumer_uuid: str) -> Mapping[str, Mapping]:
        """Return what Placement has allocated to a consumer.

        :returns: ``{provider uuid: {'resources': {class: amount}}}``, empty
            only when Placement said so.
        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def reallocate(self, server_uuid: str, consumer_uuid: str,
                   resources: Mapping[str, Mapping[str, int]]) -> None:
        """Add to the allocations of a server, or of its move, what it holds
        without an allocation.

        :param resources: ``{provider uuid: {class: amount}}``.
        :raises PlacementUnavailable: nothing has changed.
        """

    def consumers(self, provider_uuid: str) -> set[str]:
        """Return the consumers that have allocations from a provider, also
        from one that Placement does not have.

        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def consumers_of(self, provider_uuids: Collection[str],
                     ) -> dict[str, dict[str, Mapping[str, int]]]:
        """Return the consumers of several providers, with their amounts of
        each resource class.

        Queries only providers that may have changed since the last call.

        :raises PlacementUnavailable: of one of them it is not known.
        """

    def find_providers(self, trait: str | None = None,
                       uuid: str | None = None,
                       name: str | None = None) -> set[str]:
        """Return the uuids of providers of all hosts.

        :param trait: only those that have it.
        :param uuid: only this one.
        :param name: only the one of this name.
        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def unknown_traits(self, traits: Collection[str]) -> set[str]:
        """Return the given traits that Placement does not have.

        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def make_trait(self, trait: str) -> None:
        """Create a custom trait in Placement if it does not exist.

        :raises PlacementUnavailable: the answer was not 201 or 204, or none
            came.
        """

    def reporting(self) -> contextlib.AbstractContextManager:
        """Keep Nova's own report to Placement from being under way inside."""

    def show(self, provider_uuid: str, change: tree.Change,
             refused: Callable[[], None]) -> None:
        """Change a provider in Placement now; used inside reporting().

        :param change: what the provider has -> what it has to have. Called
            again where another writer was faster.
        :param refused: called when Placement has not taken the inventory that
            change returned.
        :raises PlacementUnavailable: the next report has to do it.
        """

    def configured_classes(self) -> Mapping[str, set[str]]:
        """Return the resource classes that the operator has Nova add to
        providers, by their UUIDs or names ([compute]
        provider_config_location)."""

    # Glance

    def images(self, context) -> typing.Any:
        """Return a glanceclient (version 2) with the credentials of a context;
        those of nova-compute itself only for admin_context()."""

    def service_images(self) -> typing.Any:
        """Return a glanceclient (version 2) with nova-compute's own
        credentials.

        :raises GlanceUnavailable: they are missing or refused.
        """

    def check_image(self, context, image_id: str, project_id: str) -> None:
        """See that servers of a project may use an image.

        :raises BitstreamError: they may not, or Glance has no such image.
        """

    # Servers

    def servers(self, uuids: Iterable[str]) -> list['Instance']:
        """Return Nova's entries of the given servers that are on this host
        now."""

    def moves(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the given consumers that are moves: uuid of a migration ->
        uuid of its server."""

    def open_moves(self, uuids: Iterable[str]) -> dict[str, 'Instance']:
        """Return the given resizes and cold migrations that Nova can still
        revert: uuid of a migration -> its server, with its earlier flavor."""

    def is_reverted(self, migration_uuid: str) -> bool:
        """Return whether Nova has reverted a move, False for an unknown move.
        """

    def is_latest_move(self, migration_uuid: str) -> bool:
        """Return whether Nova knows no later move of the server, False for an
        unknown move."""

    def set_metadata(self, instance_uuid: str, key: str,
                     text: str | None) -> None:
        """Set one key of a server's metadata.

        Other keys stay, except for changes that the owner makes at the same
        moment.

        :param text: None removes the key.
        """

    def notify(self, event: str, payload: Mapping[str, typing.Any]) -> None:
        """Send a notification to who listens to Nova's.

        Blocks while the message bus does not answer.

        :param payload: of values that are JSON.
        """

    # Guests

    def running(self) -> dict[str, frozenset[str]]:
        """Return the servers whose guests run, each with the addresses (as in
        model.AttachHandle) of the host devices that its guest has."""

    def guest_devices(self) -> dict[str, frozenset[str]]:
        """Return the servers whose guests libvirt knows, running or not, each
        with the addresses of its host devices, as running().

        Raises any error that leaves the list incomplete.
        """

    def carried(self) -> dict[str, str]:
        """Return the servers whose guests libvirt knows, running or not, each
        with the text that carry() wrote or its XML contains, '' for none.

        Raises any error that leaves the list incomplete.
        """

    def carry(self, instance_uuid: str, text: str) -> None:
        """Write a text into the metadata of a guest, both of the running guest
        and of its definition, if libvirt knows the guest.

        :param text: '' removes it.
        """

    def paused(self, uuids: Collection[str]) -> set[str]:
        """Return the given servers whose guests libvirt shows as paused
        without a known reason.

        Raises any error that leaves the list incomplete.
        """

    def without_iommufd(self, instance_uuid: str, addresses: Iterable[str],
                        ) -> set[str]:
        """Return the given functions of a running guest that QEMU did not open
        by iommufd."""

    def detach(self, instance_uuid: str,
               handles: Iterable[model.AttachHandle]) -> None:
        """Take devices out of a running guest; return when they are out.

        :raises DeviceError: the guest did not release one.
        """

    def attach(self, instance_uuid: str,
               handles: Iterable[model.AttachHandle],
               lasts: bool = False) -> None:
        """Put missing devices into a running guest.

        :param lasts: also into what it is started from, where it is new here.
        """


class Instance(typing.Protocol):
    """The part of Nova's entry of a server that these rooms read."""

    uuid: str
    project_id: str
    vm_state: str
    task_state: str | None
    #: whether it ever ran
    launched: bool
    metadata: Mapping[str, str]
    accelerators: request.Server
