# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The interface to Nova, Placement, Glance and libvirt, for packages that do
not import Nova.

nova_accel.virt.cloud implements it for a real nova-compute. Tests have a small
cloud of their own.
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
        """Return the allocations of a consumer in Placement.

        :returns: ``{provider uuid: {'resources': {class: amount}}}``, empty
            only if Placement has none.
        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def reallocate(self, server_uuid: str, consumer_uuid: str,
                   resources: Mapping[str, Mapping[str, int]]) -> None:
        """Restore an allocation: allocate to a server, or to its move, the
        devices that it holds.

        :param consumer_uuid: uuid of the server, or of the migration.
        :param resources: ``{provider uuid: {class: amount}}``.
        :raises PlacementUnavailable: nothing has changed.
        """

    def consumers(self, provider_uuid: str) -> set[str]:
        """Return the consumers that have allocations from a provider. If
        Placement does not have the provider, return an empty set.

        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def consumers_of(self, provider_uuids: Collection[str],
                     ) -> dict[str, dict[str, Mapping[str, int]]]:
        """Return the consumers of several providers, with their amounts of
        each resource class.

        Queries only providers that may have changed since the last call.

        :raises PlacementUnavailable: the answer for a provider is missing.
        """

    def find_providers(self, trait: str | None = None,
                       uuid: str | None = None,
                       name: str | None = None) -> set[str]:
        """Return the uuids of providers of all hosts.

        :param trait: only providers with this trait.
        :param uuid: only this provider.
        :param name: only the provider with this name.
        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def unknown_traits(self, traits: Collection[str]) -> set[str]:
        """Return the given traits that Placement does not have.

        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def make_trait(self, trait: str) -> bool:
        """Create a custom trait in Placement if it does not exist.

        :returns: True if this call created the trait, False if it existed. Of
            simultaneous calls, exactly one returns True.
        :raises PlacementUnavailable: the answer was not 201 or 204, or none
            came.
        """

    def known_traits(self, prefix: str) -> set[str]:
        """Return the traits of Placement that begin with a text.

        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def remove_trait(self, trait: str) -> None:
        """Remove a custom trait that no provider has, if it exists."""

    def hosts_for(self, groups: Mapping[str, request.Group],
                  policy: str | None) -> set[str]:
        """Return the UUIDs of the root providers of at most 1000 hosts that
        have room for a server and are not disabled.

        :param groups: groups of a request with VCPU, memory and disk, in the
            form of request.groups().
        :param policy: group_policy.
        :raises PlacementUnavailable: the answer was not 200, or none came.
        """

    def reporting(self) -> contextlib.AbstractContextManager:
        """Return a context manager: Nova's own report to Placement waits until
        its context ends."""

    def show(self, provider_uuid: str, change: tree.Change,
             refused: Callable[[], None]) -> None:
        """Change a provider in Placement now, in the context of reporting().

        :param change: function that returns the new inventory and traits for
            the present ones. Called again if another client has changed the
            provider meanwhile.
        :param refused: called if Placement rejects the new inventory.
        :raises PlacementUnavailable: the change failed. The next report
            repeats it.
        """

    def configured_classes(self) -> Mapping[str, set[str]]:
        """Return the resource classes that the operator's files of [compute]
        provider_config_location add to providers, by provider UUID or name."""

    # Glance

    def images(self, context) -> typing.Any:
        """Return a glanceclient (version 2) with the credentials of a context.
        For admin_context(), these are the credentials of nova-compute."""

    def service_images(self) -> typing.Any:
        """Return a glanceclient (version 2) with nova-compute's own
        credentials.

        :raises GlanceUnavailable: the credentials are missing or refused.
        """

    def check_image(self, context, image_id: str, project_id: str) -> None:
        """Check that servers of a project may use an image.

        :raises BitstreamError: the servers may not use the image, or Glance
            does not have it.
        """

    # Nova's API, as the user of [service_user]

    @property
    def host(self) -> str:
        """Return the name of this compute host in Nova."""

    def ask_nova(self, path: str, body: Mapping | None = None) -> dict:
        """Send a GET, or a POST with a body, to Nova's API; return the answer.

        :raises NotThere: Nova does not have the object.
        :raises InvalidRequest: Nova or Keystone refuses it.
        :raises ServiceUnavailable: no answer came. Nova may still carry out
            the request.
        """

    def migrations(self, since: str = '', server: str = '',
                   ) -> list[dict[str, typing.Any]]:
        """Return Nova's entries of migrations, each with an added key
        ``is_own``: whether the user of [service_user] has begun the migration.

        :param since: return migrations with is_own that have changed since
            this time.
        :param server: return all migrations of this server instead.
        :raises: as ask_nova().
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
        """Return whether Nova knows a move and has reverted it."""

    def is_latest_move(self, migration_uuid: str) -> bool:
        """Return whether Nova knows a migration, and knows no later migration
        of the same server."""

    def set_metadata(self, instance_uuid: str, key: str,
                     text: str | None) -> None:
        """Set one key of a server's metadata.

        Other keys stay, except for changes that the owner makes at the same
        moment.

        :param text: None removes the key.
        """

    def notify(self, event: str, payload: Mapping[str, typing.Any]) -> None:
        """Send a notification to the receivers of Nova's notifications.

        Blocks while the message bus does not answer.

        :param payload: a dictionary that can be written as JSON.
        """

    # Guests

    def running(self) -> dict[str, frozenset[str]]:
        """Return the servers with running guests: uuid of the server ->
        addresses of the host devices of its guest (as in model.AttachHandle).
        """

    def guest_devices(self) -> dict[str, frozenset[str]]:
        """Return the servers whose guests libvirt knows, running or not: uuid
        of the server -> addresses of the host devices of its guest, as
        running().

        Raises any error that leaves the list incomplete.
        """

    def carried(self) -> dict[str, str]:
        """Return the servers whose guests libvirt knows, running or not: uuid
        of the server -> text in the metadata of its guest (see carry()), or
        ''.

        Raises any error that leaves the list incomplete.
        """

    def carry(self, instance_uuid: str, text: str) -> None:
        """Write a text into the metadata of a running guest and of its
        definition. Without a guest in libvirt, do nothing.

        :param text: '' removes the present text.
        """

    def paused(self, uuids: Collection[str]) -> set[str]:
        """Return the given servers whose guests libvirt shows as paused
        without a known reason.

        Raises any error that leaves the list incomplete.
        """

    def without_iommufd(self, instance_uuid: str, addresses: Iterable[str],
                        ) -> set[str]:
        """Return the given PCI functions of a running guest that QEMU has not
        opened by iommufd."""

    def detach(self, instance_uuid: str,
               handles: Iterable[model.AttachHandle]) -> None:
        """Detach devices from a running guest, and wait for their release.

        :raises DeviceError: the guest did not release a device.
        """

    def attach(self, instance_uuid: str,
               handles: Iterable[model.AttachHandle],
               lasts: bool = False) -> None:
        """Attach missing devices to a running guest.

        :param lasts: whether to add the devices to the persistent definition
            of the guest, too. It lacks them after a live migration.
        """


class Instance(typing.Protocol):
    """The fields of Nova's entry of a server, for packages without Nova."""

    uuid: str
    project_id: str
    vm_state: str
    task_state: str | None
    #: whether the server ever ran
    launched: bool
    metadata: Mapping[str, str]
    accelerators: request.Server
