# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel why: show which hosts can take a server of a flavor, and why not.

For one device that is fenced or missing, see nova-accel discover.
"""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import functools
import time
import typing


from nova_accel.bitstream import glance
from nova_accel.bitstream import hints
from nova_accel.cmd import cloud as clouds
from nova_accel.cmd import configuration
from nova_accel.cmd import output
from nova_accel import conf
from nova_accel import demand
from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel import near
from nova_accel.planning import capacity
from nova_accel.planning import reasons
from nova_accel import profiles
from nova_accel import request
from nova_accel.scheduler import candidates
from nova_accel.scheduler import facts
from nova_accel.scheduler import scheduling as schedulings
from nova_accel.scheduler import slow
from nova_accel import text

CONF = conf.CONF

#: default of Nova's [scheduler] max_placement_results
_LIMIT = 1000
#: trait on the root of a host whose nova-compute is disabled (os-traits)
_DISABLED = 'COMPUTE_STATUS_DISABLED'
_ALL = '(all)'

FOUND, NONE, UNKNOWN = 0, 1, 2


class Why(clouds.Asks, output.Table):
    """Show which hosts can take a server of a flavor, and why others cannot.

    One row for each provider of the requested classes. Hosts that can take the
    server come first, in the order of their cost. The column Rank shows the
    order in which devices of a host are taken. Other rows show the first
    condition that is not met. Queries Placement, Nova and Glance with your
    credentials and changes nothing. Run it on a host of nova-api, whose device
    profiles it reads. The exit status is 0 if a host can take the server, 1 if
    no host can, and 2 after an error.
    """

    COLUMNS = 'Host', 'Cost', 'Group', 'Provider', 'Rank', 'Why'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser, configuration.API)
        self.add_cloud_arguments(parser)
        parser.add_argument('flavor', metavar='FLAVOR', help='name or id')
        parser.add_argument(
            '--image', metavar='IMAGE',
            help='name or id of the image of the server, whose properties may '
                 'request a bitstream')
        parser.add_argument(
            '--host', metavar='HOST', help='only this compute host')
        parser.add_argument(
            '--project', metavar='ID',
            help='the project of the server, whose bitstreams it may use '
                 '(default: that of your credentials)')
        return parser

    def run(self, parsed_args):
        try:
            return super().run(parsed_args)
        except exception.AcceleratorError as error:
            self.app.stderr.write(f'{error}\n')
            return UNKNOWN

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file, configuration.API)
        cloud = self.cloud(parsed_args)
        flavor = cloud.flavor(parsed_args.flavor)
        properties = (cloud.image(parsed_args.image)
                      if parsed_args.image else {})
        try:
            question = Question.of(flavor, properties)
        except exception.InvalidRequest as error:
            found, rows = 0, [
                _row(_ALL, why=f'nova-api refuses the flavor: {error}')]
        else:
            found, rows = Answer(
                cloud, question, parsed_args.host,
                parsed_args.project or cloud.project_id).rows()
        self.status = FOUND if found else NONE
        self.app.stderr.write(
            f'{found or "No"} host{"s" * (found != 1)} can take a server with '
            f'the flavor {flavor["name"]}.\n')
        return self.COLUMNS, rows


def _row(host, cost=None, group='', provider='', rank=None, why=''):
    return (host, '' if cost is None else cost, group, provider,
            rank or '', why)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question(capacity.Wanted):
    """The demands of a server of a flavor, with the extra specs."""

    extra_specs: Mapping[str, str]

    @classmethod
    def of(cls, flavor: Mapping, properties: Mapping[str, str]) -> 'Question':
        """Return the question for a server of a flavor with accelerators.

        :raises InvalidRequest: nova-api would refuse the flavor.
        :raises NotThere: the flavor has no accelerators.
        """
        question = cls.of_any(flavor, properties)
        profiles.check_groups(question.extra_specs)
        if not question.requests:
            raise exception.NotThere(
                f'The flavor {flavor["name"]} asks for no accelerator, and '
                f'only those are known here: see the log of nova-scheduler.')
        return question

    @classmethod
    def of_any(cls, flavor: Mapping, properties: Mapping[str, str],
               ) -> 'Question':
        """Return the question for a server of any flavor, with or without
        accelerators.

        :param flavor: the flavor as Nova's API shows it.
        :param properties: properties of the image of the server.
        :raises InvalidRequest: nova-api would refuse the flavor.
        """
        specs = profiles.expand(
            flavor['extra_specs'], profiles.ProfileStore().get)
        server = request.Server('', '', specs, properties)
        groups = dict(request.groups(specs))
        plain = groups.pop('', request.Group({}))
        groups[''] = dataclasses.replace(plain, resources={
            **_of_flavor(flavor, plain.resources), **plain.resources})
        return cls(groups=groups, requests=server.wanted,
                   policy=specs.get('group_policy'), affinity=server.affinity,
                   extra_specs=specs)


def _of_flavor(flavor, written):
    """Return processors, memory and disk of a flavor, as Nova requests them
    (ResourceRequest of nova.scheduler.utils, 31 to 34). The processors of the
    policy mixed are omitted, because the image may say how many are pinned."""
    resources = {'MEMORY_MB': flavor['ram'],
                 'DISK_GB': flavor['disk'] + flavor['OS-FLV-EXT-DATA:ephemeral']
                 + -(-int(flavor['swap'] or 0) // 1024)}
    processors = {'dedicated': 'PCPU', 'mixed': None}.get(
        flavor['extra_specs'].get('hw:cpu_policy'), 'VCPU')
    if processors and not {'VCPU', 'PCPU'} & written.keys():
        resources[processors] = flavor['vcpus']
    return resources


class _Spec:
    """A stand-in for Nova's RequestSpec, with all that scheduling reads."""

    class Flavor(dict):
        extra_specs = property(lambda self: self['extra_specs'])

    def __init__(self, extra_specs):
        self.flavor = self.Flavor(extra_specs=extra_specs)

    def __contains__(self, name):
        # like nova.objects: whether the field is set
        return hasattr(self, name)


def of_service(node, root) -> str:
    """Return why Nova schedules no server to a host: its nova-compute is
    missing, disabled or down. Return '' if it is none of these.

    :param node: Nova's entry of the compute node, or None.
    :param root: the root provider of the host.
    """
    if node is None:
        return ('Nova has no compute node for it: compare openstack hypervisor '
                'list, and delete the provider of a host that is gone')
    if _DISABLED in root.traits or node['status'] == 'disabled':
        said = node['service'].get('disabled_reason')
        return 'its nova-compute is disabled' + (
            f' ({text.printable(said)}): openstack compute service set '
            f'--enable' if said else '')
    if node['state'] != 'up':
        return ('its nova-compute is down: see that it runs and reaches the '
                'message bus, and that the clocks of the hosts agree')
    return ''


def of_levels(levels: Iterable[near.Level], root) -> str:
    """Return why a host lacks a domain that a flavor requires, or '' if it
    lacks none.

    :param root: the root provider of the host.
    """
    domains = naming.near_of(root.traits)
    return next((f'{near.KEY} requires a {level.name}, and the host does not '
                 f'report exactly one ([accel] near)' for level in levels
                 if level.required and level.name not in domains), '')


class Host(typing.NamedTuple):

    #: None if the server cannot be built there
    cost: float | None
    rows: list[tuple]


class Answer:
    """The answer to a Question, from queries of Placement and Nova.

    :param host: name of the only host to query, or None for all hosts.
    """

    def __init__(self, cloud: clouds.Cloud, question: Question,
                 host: str | None, project_id: str):
        self._cloud = cloud
        self._question = question
        self._project_id = project_id
        hosts, self._bare = cloud.hosts([host] if host else [])
        #: UUID of a root -> providers of the host, the root first
        self._trees = {tree[0].uuid: tree for tree, _ in hosts}
        #: UUID of a root -> Nova's entry of the compute node
        self._nodes = {tree[0].uuid: node for tree, node in hosts}
        self._candidates: dict[str, list] = collections.defaultdict(list)
        self._refusal = ''
        self._advice = ''
        self._is_cut = False
        summaries = self._ask(host)
        if host and not self._candidates and not any(
                'DISK_GB' in provider.inventories
                for tree in self._trees.values() for provider in tree):
            # none of their trees contains a shared provider of disk
            summaries = self._ask(None) or summaries
        self._scheduling = schedulings.Scheduling(
            _Spec(question.extra_specs), summaries, demand.Demand(),
            lambda url, version: None)
        self._images: dict[tuple, typing.Any] = {}

    def rows(self) -> tuple[int, list[tuple]]:
        """Return how many hosts can take the server, and all rows, with these
        hosts first."""
        hosts = sorted(map(self.of_host, self._trees), key=lambda host: (
            host.cost is None, host.cost or 0))
        return (sum(host.cost is not None for host in hosts),
                [row for host in hosts for row in host.rows] + self.others())

    # Placement

    def _ask(self, host):
        if not self._trees:
            return {}
        began = time.monotonic()
        try:
            answer = self._cloud.get('placement', candidates.url(
                self._question.groups, _LIMIT, policy=self._question.policy,
                root_forbidden=[_DISABLED],
                in_tree=next(iter(self._trees)) if host else None),
                what='allocation candidates')
        except exception.InvalidRequest as error:
            # a class or a trait that Placement does not know
            self._refusal = str(error)
            return {}
        self._advice = slow.advice(
            time.monotonic() - began, self._question.groups.values())
        with clouds.asking('placement', 'allocation candidates'):
            summaries = clouds.part_of(answer, 'provider_summaries')
            found = clouds.part_of(answer, 'allocation_requests')
            self._is_cut = len(found) >= _LIMIT
            for candidate in found:
                roots = {summaries[provider]['root_provider_uuid']
                         for provider in candidate['allocations']}
                # a candidate has one host, and maybe the shared provider of
                # disk
                for root in roots & self._trees.keys():
                    self._candidates[root].append(candidate)
        return summaries

    @functools.cache
    def _who(self, consumer):
        name = self._cloud.server_name(consumer)
        if name is not None:
            return f'server {name} ({consumer})'
        kind = self._cloud.get(
            'placement', f'/allocations/{consumer}').get('consumer_type')
        if kind == 'MIGRATION':
            return f'migration {consumer}, until it is confirmed or reverted'
        return (f'{consumer}, which is not a server of Nova: see openstack '
                f'resource provider allocation show {consumer}, and delete it '
                f'with openstack resource provider allocation delete '
                f'{consumer}')

    # Hosts

    def others(self) -> list[tuple]:
        """Return rows for hosts without accelerators, and for problems that
        concern all hosts."""
        rows = []
        rows += [_row(_ALL, why=why)
                 for why in (self._refusal, self._advice) if why]
        if self._bare:
            rows.append(_row(
                text.some(self._bare),
                why='no accelerators are reported: check compute_driver and '
                    '[accel] enabled_drivers of nova-compute'))
        clauses = near.unreported(self._scheduling.affinity.levels, (
            naming.near_of(tree[0].traits) for tree in self._trees.values()))
        rows += [_row(_ALL, why=f'{clause}: set [accel] near of nova-compute, '
                                f'or correct the flavor')
                 for clause in clauses.values()]
        return rows + self._preferences()

    def _preferences(self):
        preferred = {trait for wanted in self._question.requests
                     for trait in wanted.prefer}
        there = preferred and self._cloud.get(
            'placement', '/traits?associated=true&name=in:'
            + ','.join(sorted(preferred)), key='traits')
        return [_row(_ALL, group=wanted.group, why=(
            f'accel{wanted.group}:prefer names {trait}, which no provider '
            f'has: correct it, or see that nova-compute reports devices with '
            f'it')) for wanted in self._question.requests
            for trait in wanted.prefer if trait not in there]

    def of_host(self, root: str) -> Host:
        """Return the cost of a server on a host, and the rows of the host."""
        providers = self._trees[root]
        name = providers[0].name
        offered = self._candidates.get(root, [])
        kept = list(offered)
        if self._scheduling.affinity.is_strict:
            kept = [c for c in offered
                    if self._scheduling.may_satisfy(c)]
        kept.sort(key=self._scheduling.cost)
        ranks = self._ranks(kept)
        why = self._of_whole(providers, offered, kept)
        cost = None
        if kept and not why:
            cost = round(self._scheduling.cost(kept[0]), 2)
        rows = []
        for need in reasons.needs(self._question.groups):
            if not reasons.is_of_accelerators(need):
                continue
            for provider in reasons.having_classes(need, providers):
                rank = ranks.get((need.group, provider.uuid))
                said, fits = self._of_provider(need, provider)
                if rank == 1 and not fits:
                    # Nova selects the host, but the build fails there
                    cost = None
                rows.append((need.group, provider.name, rank, said))
        rows.sort(key=lambda row: (row[0], row[2] is None, row[2] or 0))
        return Host(cost, [_row(name, why=clause) for clause in why] + [
            _row(name, cost, *row) for row in rows])

    def _of_whole(self, providers, offered, kept):
        """Return reasons why a host cannot take the server, as clauses, apart
        from reasons of a single provider."""
        wrong = of_service(
            self._nodes[providers[0].root], providers[0]) or of_levels(
                self._scheduling.affinity.levels, providers[0])
        if wrong:
            return [wrong]
        if offered and not kept:
            return [f'the flavor needs all accelerators '
                    f'{self._scheduling.affinity}, and they are on '
                    + self._scheduling.fewest_places(offered)]
        if offered:
            return []
        found = reasons.of_host(self._question.groups, providers, self._who,
                                self._question.policy)
        if found or self._refusal or not all(
                any(reasons.of_provider(need, p, self._who) is None
                    for p in reasons.having_classes(need, providers))
                for need in reasons.needs(self._question.groups)):
            return found
        if self._is_cut:
            return [f'it is not among the first {_LIMIT} candidates of '
                    f'Placement, of which Nova takes as many ([scheduler] '
                    f'max_placement_results)']
        return ['Placement offers nothing of it now, and everything that was '
                'examined is free: ask again']

    def _ranks(self, ordered):
        """Return (group, UUID of a provider) -> rank. In each group, Nova uses
        the provider with rank 1 first."""
        ranks: dict[tuple[str, str], int] = {}
        count: collections.Counter[str] = collections.Counter()
        for candidate in ordered:
            for wanted in self._scheduling.requests:
                for provider in facts.providers(wanted, candidate):
                    if (wanted.group, provider) not in ranks:
                        count[wanted.group] += 1
                        ranks[wanted.group, provider] = count[wanted.group]
        return ranks

    # Providers

    def _of_provider(self, need, provider):
        """Return a text about a provider for the column Why, and whether the
        provider satisfies the need."""
        found = reasons.of_provider(need, provider, self._who)
        if found:
            return found, False
        wanted = [w for w in self._question.requests
                  if w.group == need.group and w.programs
                  and w.resource_class in need.resources]
        for one in wanted:
            return self._of_function(one, provider)
        return f'free{self._unseen_place(need, provider)}', True

    def _unseen_place(self, need, provider) -> str:
        """Return a warning if only the host can check the location that the
        flavor requires, because no trait shows it. Otherwise return ''."""
        affinity = self._scheduling.affinity
        node, root = naming.place_of(provider.traits)
        if not affinity.is_strict or (root if affinity.one_root else node) or (
                sum(need.resources.values()) == 1
                and len(self._question.requests) == 1):
            return ''
        return (f'; only its host knows whether they are {affinity}, and '
                f'refuses the server if not (Placement shows it with [accel] '
                f'pools = numa_node)')

    def _of_function(self, wanted, region):
        if not wanted.chosen_by_owner and not region.traits.isdisjoint(
                wanted.wanted_traits):
            return 'free, carries the function', True
        may = naming.PROGRAMMABLE in region.traits
        try:
            choice, image = self._image(
                wanted, naming.region_type_of(region.traits),
                hints.vendor_of(region.traits))
        except (exception.BitstreamError,
                exception.IncompatibleBitstream) as error:
            if may:
                return str(error), False
        else:
            if self._is_named(choice, image, region):
                return 'free, carries the function', True
            if may:
                return f'free, is programmed with {image}', True
        return ('carries another function and must not be programmed: '
                + ('another server uses it' if region.allocations
                   else '[accel] fixed_devices')), False

    def _image(self, wanted, region_type, vendor):
        key = wanted, region_type, vendor
        if key not in self._images:
            try:
                self._images[key] = self._look_up(*key)
            except (exception.BitstreamError,
                    exception.IncompatibleBitstream) as error:
                self._images[key] = error
        if isinstance(self._images[key], exception.AcceleratorError):
            raise self._images[key]
        return self._images[key]

    def _look_up(self, wanted, region_type, vendor):
        """Return what nova-compute will program: (choice, image). A choice is
        a request for one of the acceptable functions. The header of the
        image's file is checked.

        :raises AcceleratorError: no image fits, or the header is invalid.
        """
        client = self._cloud.images()
        # the operator can see all images: their own, and those of tenants
        operators = (client if CONF.accel.bitstream_owners
                     and not wanted.chosen_by_owner else None)
        try:
            choice, _, image = glance.find_first(
                wanted, lambda one: glance.find(
                    client, one, region_type, self._project_id, operators))
        except exception.BitstreamError as error:
            more = hints.not_counted(client, wanted, self._project_id)
            if more:
                # the advice of find() is for the owner of a server
                found = str(error).rpartition(': ')[0] or str(error)
                raise exception.BitstreamError(f'{found}. {more}') from error
            raise
        bitstream = hints.header(client, image, vendor)
        if bitstream:
            glance.verify(
                bitstream, choice.function_id, image, model.Region(
                    0, region_type, None))
        return choice, image

    @staticmethod
    def _is_named(choice, image, region):
        """Return whether a region carries the function of an image that the
        operator named only later. nova-compute stores the name when a server
        arrives."""
        function = glance.function_id(image)
        return bool(
            choice.function_name and function
            and glance.origin(image.entry) == model.OPERATOR
            and naming.function_trait(function) in region.traits)
