# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Make Nova's provider trees cheap for hosts with many providers.

At each report Nova (31 to 34) copies the tree of a host twice, and goes
through all of its providers ten times: 0.6 s of processor for 641 providers.
The methods here return the same results in less time.

A copy of a tree shares the providers. Before a tree changes a provider, it
copies this provider and the providers above it. For example, nova-compute adds
a trait to a region in its copy: the copy then has its own root, card and
region, and shares all other objects with Nova's cache. A provider belongs to a
tree as long as it and the root have the same _OWNER. Copying a tree clears the
_OWNER of its root.

Hence two trees whose roots have the same children have the same providers. The
class Below has results derived from these providers, computed once.
"""

from collections.abc import Callable, Iterable, Iterator
import copy
import functools
import typing

from nova.compute import pci_placement_translator
from nova.compute import provider_tree
import os_traits

from nova_accel import wrapping

#: known fields of ProviderData, in order
_FIELDS = ('uuid', 'name', 'generation', 'parent_uuid', 'inventory', 'traits',
           'aggregates', 'resources')
#: the fields that Nova compares with its cache, and writes
_WRITTEN = ('inventory', 'traits', 'aggregates')
_ATOMS = frozenset({str, int, float, bool, type(None)})
#: attributes that this module adds to Nova's providers
_OURS = _OWNER, _BELOW = '_nova_accel_owner', '_nova_accel_below'

#: provider uuid -> uuid of its parent when it was last added to a tree
_parents: dict[str, str] = {}


class Below(typing.NamedTuple):
    """The providers below a root, and facts about all of them; read-only."""

    #: of the root when this was computed
    children: dict[str, typing.Any]
    #: from the top down, as Nova orders them
    providers: dict[str, typing.Any]
    names: frozenset[str]
    traits: frozenset[str]
    #: resource classes of providers that share by aggregate
    shared: frozenset[str]


def install() -> None:
    """Replace the methods of Nova's classes, once."""
    if provider_tree.ProviderData._fields != _FIELDS:
        return
    for (owner, name), ours in REPLACED.items():
        wrapping.wrap(owner, name, ours)


def below(tree, root: str) -> Below:
    """Return the providers below a root: the same object until one of them
    changes.

    :param root: name or UUID.
    :raises KeyError: the tree has no such root.
    """
    with tree.lock:
        return _below(tree.roots_by_uuid.get(root)
                      or tree.roots_by_name[root])


def differing(new, old) -> set[str]:
    """Return the UUIDs of providers of new that are missing in old, or have
    other inventory, traits or aggregates there."""
    found = set()
    for uuid in [root.uuid for root in new.roots]:
        now, before = below(new, uuid), (
            below(old, uuid) if uuid in old.roots_by_uuid else None)
        pairs = [(new.roots_by_uuid[uuid], old.roots_by_uuid.get(uuid))]
        if now is not before:
            olds = before.providers if before else {}
            pairs += [(p, olds.get(p.uuid)) for p in now.providers.values()]
        found |= {p.uuid for p, other in pairs if p is not other and (
            other is None or any(getattr(p, name) != getattr(other, name)
                                 for name in _WRITTEN))}
    return found


def _computed(root) -> Below | None:
    found = vars(root).get(_BELOW)
    return found if (
        found and found.children == root.children and hasattr(
            provider_tree.ProviderTree.data, wrapping.ORIGINAL)) else None


def _below(root) -> Below:
    found = _computed(root)
    if found is None:
        # none of them changes after this
        setattr(root, _OWNER, None)
        providers = {p.uuid: p for p in _walk(root.children.values())}
        found = Below(
            root.children.copy(), providers,
            frozenset(p.name for p in providers.values()),
            frozenset().union(*(p.traits for p in providers.values())),
            _shared(providers.values()))
        setattr(root, _BELOW, found)
    return found


def _walk(providers: Iterable) -> Iterator:
    for provider in providers:
        yield provider
        yield from _walk(provider.children.values())


def _shared(providers: Iterable) -> frozenset[str]:
    return frozenset(
        name for provider in providers
        if os_traits.MISC_SHARES_VIA_AGGREGATE in provider.traits
        for name in provider.inventory)


# ProviderTree

def _find(find, tree, name_or_uuid: str, return_root: bool = False):
    """Return a provider, or its root, that the caller may change. If other
    trees share the provider, first create a copy for this tree."""
    root, path = _path(tree, name_or_uuid)
    if root is None:
        if all((found := _computed(root)) and name_or_uuid not in found.names
               and name_or_uuid not in found.providers for root in tree.roots):
            # Nova's error, without a walk through the tree
            tree = provider_tree.ProviderTree()
        # found by its name, or not added since install()
        uuid = find(tree, name_or_uuid).uuid
        if _path(tree, uuid)[0] is None:
            _parents.update((p.uuid, p.parent_uuid)
                            for p in _walk(tree.roots))
        root, path = _path(tree, uuid)
    owner = getattr(root, _OWNER, None)
    if owner is None:
        owner = object()
        root = _clone(root, owner)
        tree.roots_by_uuid[root.uuid] = tree.roots_by_name[root.name] = root
    provider = root
    for uuid in path:
        child = provider.children[uuid]
        if getattr(child, _OWNER, None) is not owner:
            child = provider.children[uuid] = _clone(child, owner)
        provider = child
    return root if return_root else provider


def _path(tree, name_or_uuid: str):
    """Return (root of a provider, UUIDs of the providers below the root down
    to this provider), or (None, []) if the tree lacks the provider."""
    root = tree.roots_by_uuid.get(name_or_uuid) or tree.roots_by_name.get(
        name_or_uuid)
    path: list[str] = []
    above: str | None = name_or_uuid
    while root is None and above in _parents:
        path.insert(0, above)
        above = _parents[above]
        root = tree.roots_by_uuid.get(above)
    provider = root
    for uuid in path if root else ():
        provider = provider.children.get(uuid)
        if provider is None:
            return None, []
    return root, path


def _clone(provider, owner):
    clone = provider.__class__.__new__(provider.__class__)
    for name, value in vars(provider).items():
        setattr(clone, name, value.copy() if name == 'children'
                else value if name in _OURS else _copied(value))
    setattr(clone, _OWNER, owner)
    return clone


def _data(_, tree, name_or_uuid: str) -> provider_tree.ProviderData:
    """Return a copy of a provider's data, which the caller may change."""
    with tree.lock:
        root, path = _path(tree, name_or_uuid)
        provider = tree._find_with_lock(name_or_uuid) if root is None else (
            functools.reduce(lambda at, uuid: at.children[uuid], path, root))
        return provider_tree.ProviderData(
            *(_copied(getattr(provider, name)) for name in _FIELDS))


def _has_sharing_provider(_, tree, resource_class: str) -> bool:
    with tree.lock:
        return any(resource_class in found for root in tree.roots
                   for found in (_shared([root]), _below(root).shared))


def _copy(_, tree, memo: dict):
    """Copy a tree under its lock: with native threads, another thread may
    change the tree."""
    copied = copy.copy(tree)
    with tree.lock:
        for name, value in vars(tree).items():
            if name != 'lock':
                setattr(copied, name, copy.deepcopy(value, memo))
    return copied


# _Provider

def _uuids(get, provider) -> list[str]:
    if provider.parent_uuid is not None:
        return get(provider)
    return [provider.uuid, *_below(provider).providers]


def _add_child(add, provider, child) -> None:
    _parents[child.uuid] = provider.uuid
    add(provider, child)


def _share(_, provider, memo: dict):
    """Copy a provider and the providers below it. If the provider is a root,
    return it instead: copies of a tree share their roots."""
    if provider.parent_uuid is None:
        setattr(provider, _OWNER, None)
        return provider
    clone = memo[id(provider)] = _clone(provider, None)
    clone.children = copy.deepcopy(provider.children, memo)
    return clone


def _copied(value):
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is set and all(type(item) is str for item in value):
        return value.copy()
    return copy.deepcopy(value)


# nova.compute.pci_placement_translator

def _check_tracking(check, tree) -> None:
    trait = os_traits.COMPUTE_MANAGED_PCI_DEVICE
    if any(trait in root.traits or trait in below(tree, root.uuid).traits
           for root in list(tree.roots)):
        check(tree)


#: class or module, and name of its function -> its replacement, which gets the
#: function, or None if Nova has none
REPLACED: dict[tuple[typing.Any, str], Callable] = {
    (provider_tree.ProviderTree, '_find_with_lock'): _find,
    (provider_tree.ProviderTree, 'data'): _data,
    (provider_tree.ProviderTree, 'has_sharing_provider'):
        _has_sharing_provider,
    (provider_tree.ProviderTree, '__deepcopy__'): _copy,
    (provider_tree._Provider, 'get_provider_uuids'): _uuids,
    (provider_tree._Provider, 'add_child'): _add_child,
    (provider_tree._Provider, '__deepcopy__'): _share,
    (pci_placement_translator, 'ensure_tracking_was_not_enabled_before'):
        _check_tracking}
