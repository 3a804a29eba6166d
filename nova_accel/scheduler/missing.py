# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Explain which accelerators were missing if a request found no host.

The owner of the server reads the explanation. Hence it names requests of the
flavor, but neither hosts nor other servers. Pure: Placement is asked through a
callable that is passed in.
"""

from collections.abc import Callable, Mapping
import dataclasses
import enum
import textwrap
import typing
import uuid

from nova_accel import exception
from nova_accel import naming
from nova_accel import near
from nova_accel import request
from nova_accel.scheduler import scheduling

#: Nova begins the fault with words of its own
#: (nova.exception.NoValidHost, Nova 31 to 34)
_LENGTH = exception.FAULT - len('No valid host was found. ')
_LATER = 'try again later, or choose another flavor'


class Answer(enum.Enum):
    """The answer of Placement for request groups."""

    #: a host has all of them free
    FREE = 'free'
    #: no host has them free
    NONE = 'none'
    #: a class or a trait was never reported
    UNKNOWN = 'unknown'


#: returns the answer for some groups alone; {} asks for a host without
#: accelerators
Ask = Callable[[Mapping[str, request.Group]], Answer]


def of_accelerators(groups: Mapping[str, request.Group],
                    ) -> dict[str, request.Group]:
    """Return the groups that ask for accelerators.

    :param groups: the result of request.groups(). The returned unnumbered
        group has only accelerators and their memory, because its other
        resources may come from other providers.
    """
    found = {}
    for suffix, group in groups.items():
        resources = {name: amount for name, amount in group.resources.items()
                     if amount}
        if not naming.accelerators(resources):
            continue
        if not suffix:
            resources = {name: amount for name, amount in resources.items()
                         if _is_of_device(name)}
        found[suffix] = dataclasses.replace(group, resources=resources)
    return found


def refusal(wanted: scheduling.Scheduling | None) -> str:
    """Return why no host with accelerators was left: AcceleratorFilter dropped
    all of them, or none is in the required domains.

    :returns: a sentence without "No valid host", or '' if this is not the
        case.
    """
    if wanted is None:
        return ''
    if wanted.refused is scheduling.Refusal.PLACES:
        return (f'Accelerators: no host for this server has all of them free '
                f'{wanted.affinity}: {_LATER}.')
    if wanted.refused is scheduling.Refusal.GUEST:
        return (f'Accelerators: no host has them free on NUMA nodes where this '
                f'server fits, too: {_LATER}.')
    why = ''
    if wanted.refused is scheduling.Refusal.NEAR and wanted.near:
        why = wanted.near.refusal
    elif wanted.expected.only and not wanted.facts.is_answered:
        why = near.full(wanted.expected.only, 0, wanted.expected.servers)
    if why:
        return f'Accelerators: {why}: {_LATER}.'
    if wanted.refused is scheduling.Refusal.DRIVER:
        return (f'Accelerators: the hosts that have them for this server do '
                f'not give any out now: {_LATER}.')
    return ''


def reason(groups: Mapping[str, request.Group], servers: int,
           ask: Ask) -> str:
    """Return which accelerators of a request were missing.

    :param groups: groups of the request, as of_accelerators() returned them.
    :param servers: number of servers that were requested together.
    :returns: a sentence, which the caller appends to Nova's "No valid host".
        '' if no accelerators are missing.
    """
    whole = ask(groups)
    if whole is Answer.FREE:
        if servers > 1:
            return (f'Accelerators: a host has those of one server free, and '
                    f'not all {servers} servers of the request find a host: '
                    f'request fewer at a time.')
        return (f'Accelerators: a host has them free, but it is out of '
                f'service, or lacks something else that the server asks for '
                f'(processors, memory, disk, zone, networks): {_LATER}.')
    # equal groups have one answer
    alone: list[request.Group] = []
    for suffix, group in groups.items():
        if suffix and group in alone:
            continue
        answer = ask({suffix: group})
        if answer is not Answer.FREE:
            return _of_group(suffix, group, answer, len(groups) > 1, ask)
        alone += [group] * bool(suffix)
    return (f'Accelerators: each of the {len(groups)} groups of the flavor '
            f'can be had, and no host for this server has all of them '
            f'together: {_LATER}.')


def _of_group(suffix, group, answer, is_one_of_several, ask):
    cuts = _cuts(suffix, group)
    bare = group
    for cut in cuts:
        bare = cut.without(bare)
    named = next(([cut] for cut in cuts if ask(
        {suffix: cut.without(group)}) is Answer.FREE), [])
    if not named and cuts:
        left = ask({suffix: bare})
        if left is Answer.FREE:
            named = cuts
        else:
            # its required properties are irrelevant
            group, answer = bare, left
    if not named and ask({}) is not Answer.FREE:
        # no host is left for the server, whatever it requests
        return ''
    is_known = answer is Answer.NONE
    head = (f'Accelerators: no host for this server '
            f'{"has" if is_known else "offers"} {_things(group, is_known)}')
    tail = (f' (group {suffix})' if is_one_of_several and suffix else '') + (
        f', {named[0].free}' if named else '') + (
        f': {_LATER}.' if is_known else ': choose another flavor.')
    words = ' and '.join(cut.words for cut in named if cut.words)
    if words:
        # at least as long as the placeholder: names of classes and groups can
        # use all the room
        words = ' ' + textwrap.shorten(
            words, max(10, _LENGTH - len(head) - len(tail) - 1),
            placeholder=' ...')
    return head + words + tail


class _Cut(typing.NamedTuple):
    """A demand of a group, for example its traits, that can be left out to
    find out whether it is the reason why no host was found."""

    words: str
    #: the accelerators that are free if a host has the group without the
    #: demand
    free: str
    without: Callable[[request.Group], request.Group]


def _cuts(suffix, group):
    cuts = []
    # traits of the unnumbered group may be of any provider of the host
    if suffix and (group.required or group.forbidden):
        cuts.append(_Cut(_qualities(group), 'others are free', lambda g: (
            dataclasses.replace(
                g, required=frozenset(), forbidden=frozenset()))))
    memory = {name: amount for name, amount in group.resources.items()
              if naming.is_memory_class(name)}
    if memory:
        cuts.append(_Cut('with ' + ' and '.join(
            f'{amount} MiB of {naming.type_of(name)}'
            for name, amount in sorted(memory.items())),
            'some with less are free',
            lambda g: dataclasses.replace(g, resources={
                name: amount for name, amount in g.resources.items()
                if not naming.is_memory_class(name)})))
    if max(naming.accelerators(group.resources).values()) > 1:
        cuts.append(_Cut('', 'fewer are free', lambda g: dataclasses.replace(
            g, resources={name: 1 if naming.is_accelerator_class(name)
                          else amount
                          for name, amount in g.resources.items()})))
    return cuts


def _is_of_device(name):
    return naming.is_accelerator_class(name) or naming.is_memory_class(name)


def _things(group, are_known):
    wanted = sorted(naming.accelerators(group.resources).items())
    if len(wanted) == 1 and wanted[0][1] == 1:
        return (f'{"a free" if are_known else "any"} '
                f'{naming.type_of(wanted[0][0])}')
    return ' and '.join(
        f'{amount} {naming.type_of(name)}' for name, amount in wanted
    ) + (' free' if are_known else '')


def _qualities(group):
    parts = []
    if group.required:
        parts.append('with ' + ', '.join(
            map(_quality, sorted(group.required))))
    if group.forbidden:
        parts.append('without ' + ', '.join(sorted(group.forbidden)))
    return ' and '.join(parts)


def _quality(trait):
    """Return what a trait demands, in the words of a flavor."""
    function = naming.function_of(trait)
    if function:
        return f'the function {uuid.UUID(function)}'
    name = naming.function_name_of(trait)
    if name:
        return f'the function {name}'
    image = naming.bitstream_of(trait)
    if image:
        return f'the bitstream {image}'
    if trait == naming.PROGRAMMABLE:
        return 'a region that may be programmed'
    return trait
