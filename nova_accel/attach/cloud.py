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
        """Allocate to a server, or to its move, what it holds without an
        allocation, in addition to what is allocated to it.

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
        """Return the same of many providers, and what each consumer has of
        which resource class. Those are asked that may not be as they were when
        they were asked before.

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

    def make_trait(self, trait: str) -> None:
        """Have Placement know a custom trait, whether a provider has it or
        not.

        :raises PlacementUnavailable: the answer was not 201 or 204, or none
            came.
        """

    def reporting(self) -> contextlib.AbstractContextManager:
        """Keep Nova's own report to Placement from being under way inside."""

    def show(self, context, provider_uuid: str, change: tree.Change,
             refused: Callable[[], None]) -> None:
        """Change a provider in Placement now; inside reporting().

        :param change: what the provider has -> what it has to have. Called
            again where another writer was faster.
        :param refused: called when Placement has not taken the inventory that
            change returned.
        :raises PlacementUnavailable: the next report has to do it.
        """

    def configured_classes(self, provider_uuid: str, name: str) -> set[str]:
        """Return the resource classes that the operator has Nova add to a
        provider ([compute] provider_config_location)."""

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
        """Return Nova's entries of those servers that are on this host now."""

    def moves(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return those of these consumers that are moves: uuid of a migration
        -> uuid of its server."""

    def open_moves(self, uuids: Iterable[str]) -> dict[str, 'Instance']:
        """Return those of these resizes and cold migrations that Nova may
        still revert: uuid of a migration -> its server, with the flavor that
        it had before."""

    def is_reverted(self, migration_uuid: str) -> bool:
        """Return whether a server is again what it was before a resize, as
        Nova has it; False of a move of which Nova does not know."""

    def is_latest_move(self, migration_uuid: str) -> bool:
        """Return whether no later move of its server has begun, as Nova has
        it; False of a move of which Nova does not know."""

    def set_metadata(self, instance_uuid: str, key: str,
                     text: str | None) -> None:
        """Set one key of a server's metadata and leave the others alone, but
        for what its owner writes in the same moment.

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
        with the addresses of its host devices, as running() has them.

        Raises whatever says that it is not known of all of them.
        """

    def carried(self) -> dict[str, str]:
        """Return the servers whose guests libvirt knows, running or not, each
        with what carry() wrote last, or its XML had; '' for nothing.

        Raises whatever says that it is not known of all of them.
        """

    def carry(self, instance_uuid: str, text: str) -> None:
        """Write a text into the metadata of a guest, if libvirt knows it:
        where it runs, and where it starts from.

        :param text: '' removes it.
        """

    def paused(self, uuids: Collection[str]) -> set[str]:
        """Return those of these servers whose guests libvirt shows paused, and
        for no reason that it knows.

        Raises whatever says that it is not known of all of them.
        """

    def without_iommufd(self, instance_uuid: str, addresses: Iterable[str],
                        ) -> set[str]:
        """Return those of some functions of a running guest that QEMU has not
        opened by iommufd."""

    def detach(self, instance_uuid: str,
               handles: Iterable[model.AttachHandle]) -> None:
        """Take devices out of a running guest; ends when they are out.

        :raises DeviceError: the guest did not let go of one.
        """

    def attach(self, instance_uuid: str,
               handles: Iterable[model.AttachHandle],
               lasts: bool = False) -> None:
        """Put devices into a guest, where it runs and has not got them.

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
