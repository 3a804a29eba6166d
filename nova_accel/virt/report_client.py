# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Save requests of Nova's report client for hosts with many providers.

Nova (31 to 34) reports a host to Placement at each claim and in each periodic
pass (ResourceTracker._update_to_placement). Two of its queries send one request
per provider, and a host with 512 FPGA regions has 641 providers or more:

* Allocations, at each report. Nova reads the answer only to move allocations,
  when nova-compute starts, and for its own PCI devices ([pci]
  report_in_placement). Here they are fetched when they are read.
* Inventory, aggregates and traits, every [compute]
  resource_provider_association_refresh seconds, in whichever claim comes
  first. Here one request lists the generations of all providers, and a
  provider of nova_accel whose generation is that of Nova's copy is skipped:
  Placement (16.0) counts a generation up with each change of inventory and
  traits, and with each change of aggregates from its API 1.19 on.

Nova then compares each provider with its copy to find those to write. Here it
compares only those that the report has changed (virt.provider_trees).

A fourth wrap repeats deletions of allocations that Placement refuses.
"""

from collections.abc import Callable, Collection
import copy
import functools
import time
import typing

from nova import exception as nova_exception

from nova_accel import naming
from nova_accel.virt import provider_trees
from nova_accel import wrapping

#: number of tries to delete an allocation
_DELETIONS = 3


def watch(client) -> None:
    """Wrap a nova.scheduler.client.report.SchedulerReportClient, once."""
    for name, ours in WRAPS.items():
        if hasattr(client, name):
            wrapping.wrap(client, name, functools.partial(ours, client))


def _delete_again(client, delete, *args, **kwargs):
    """Delete the allocations of a server; retry if Placement refuses.

    Placement refuses to delete allocations from several providers while one of
    these is written, because Placement makes all tries in one transaction. A
    new request succeeds, but Nova makes none after a move
    (ComputeManager._delete_allocation_after_move, 31 to 34): the server would
    be in ERROR because its old device is shown as free at that moment.
    """
    for _ in range(_DELETIONS - 1):
        try:
            return delete(*args, **kwargs)
        except nova_exception.AllocationDeleteFailed as error:
            if 'conflict' not in str(error):
                raise
    return delete(*args, **kwargs)


def _allocations(client, get, context, nodename):
    """Return the allocations of a host, fetched only when they are first read.

    :raises ValueError: Nova's copy of the provider tree lacks the host. Nova's
        own method raises the same error.
    """
    tree = client._provider_tree
    if not _has_ours(tree, tree.data(nodename).uuid):
        return get(context, nodename)
    return Unread(lambda: get(context, nodename))


def _ensure(client, ensure, context, uuid, *args, **kwargs):
    """Refresh the providers of a host in Nova's copy, if they have changed.

    :raises: Nova's error if Placement does not answer.
    """
    if _has_ours(client._provider_tree, uuid):
        if client._associations_stale(uuid):
            _refresh(client, context, uuid)
        if not _is_stale(client, uuid):
            return uuid
    return ensure(context, uuid, *args, **kwargs)


def _is_stale(client, root: str) -> bool:
    """Return whether Nova must read a provider of a host again."""
    times = client._association_refresh_time
    uuids = client._provider_tree.get_provider_uuids(root)
    return not times.keys() >= set(uuids) or client._associations_stale(
        min(uuids, key=times.__getitem__))


def _refresh(client, context, root: str) -> None:
    tree = client._provider_tree
    now = {provider['uuid']: provider
           for provider in client.get_providers_in_tree(context, root)}
    known = provider_trees.below(tree, root).providers
    if now.keys() != {root, *known}:
        # Nova reads the whole tree
        return
    node = now[root]['name']
    for uuid, provider in now.items():
        if (naming.part_of_provider(node, provider['name']) is None
                or known[uuid].generation != provider['generation']
                or uuid not in client._association_refresh_time):
            client._refresh_associations(context, uuid, force=True)
        else:
            client._association_refresh_time[uuid] = time.time()


def _update(client, update, context, new_tree, *args, **kwargs):
    """Write the differences from Nova's copy to Placement."""
    if any(_has_ours(new_tree, root.uuid) for root in new_tree.roots):
        uuids = _Reported(new_tree.get_provider_uuids())
        uuids.differ = provider_trees.differing(
            new_tree, client._provider_tree)
        # the copy shares the providers
        new_tree = copy.copy(new_tree)
        new_tree.get_provider_uuids = lambda: uuids
    return update(context, new_tree, *args, **kwargs)


class _Reported(list):
    """The UUIDs of a tree. Nova (31 to 34) iterates in reverse order to
    compare providers with its copy. Then only the UUIDs in ``differ`` are
    returned."""

    #: the providers to compare
    differ: Collection[str] = ()

    def __reversed__(self):
        return (uuid for uuid in super().__reversed__()
                if uuid in self.differ)


def _has_ours(tree, root: str) -> bool:
    """Return whether a host has providers of nova_accel.

    :param root: UUID of the provider of the host.
    """
    top = tree.roots_by_uuid.get(root)
    return top is not None and any(
        naming.part_of_provider(top.name, provider.name) is not None
        for provider in provider_trees.below(tree, root).providers.values())


#: method of the client -> its replacement, which gets the client and the
#: method
WRAPS: dict[str, Callable] = {
    'delete_allocation_for_instance': _delete_again,
    'get_allocations_for_provider_tree': _allocations,
    '_ensure_resource_provider': _ensure,
    'update_from_provider_tree': _update}


class Unread(dict):
    """Allocations that are fetched when they are first read.

    This is a dict, because Nova reads and changes it, and then sends it to
    Placement as JSON. If an Unread was never read, json writes {}. If fetching
    fails, reading raises the error, and the next reading fetches again.
    """

    def __init__(self, fetch: Callable[[], dict[str, typing.Any]]):
        super().__init__()
        self._fetch: Callable[[], dict[str, typing.Any]] | None = fetch

    def _read(self) -> None:
        if self._fetch is not None:
            answer = self._fetch()
            self._fetch = None
            super().update(answer)

    def __reduce_ex__(self, protocol):
        """Return a plain dict for copies, including deep copies."""
        return dict, (dict(self),)


def _read_first(method):
    @functools.wraps(method)
    def read(self, *args, **kwargs):
        self._read()
        return method(self, *args, **kwargs)
    return read


#: attributes of every object, which do not need the allocations
_UNREAD = ('__new__', '__init__', '__getattribute__', '__class_getitem__',
           'fromkeys', '__doc__', '__hash__')
for _name, _method in vars(dict).items():
    if _name not in _UNREAD:
        setattr(Unread, _name, _read_first(_method))
