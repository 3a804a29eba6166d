# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel defrag: the fewest cold migrations that make room for a flavor, or
bring a server group together.
"""

from collections.abc import Mapping
import json
import time

from nova_accel.cmd import cloud as clouds
from nova_accel.cmd import configuration
from nova_accel.cmd import fits
from nova_accel.cmd import output
from nova_accel.cmd import why
from nova_accel import exception
from nova_accel import naming
from nova_accel.planning import capacity
from nova_accel.planning import defrag
from nova_accel import text

#: seconds between two requests about a server, and maximum for a migration
_PAUSE, _LONGEST = 2, 3600
#: statuses in which Nova migrates a server cold, and which the server has again
#: afterwards
_STEADY = 'ACTIVE', 'SHUTOFF'
_PLANNED, _DONE = 'planned', 'done'


class Defrag(clouds.Asks, output.Table):
    """Plan the fewest cold migrations that make room for servers of a flavor.

    With --near, the servers must fit into one domain of that level. With
    --group, the plan brings the members of a server group into one domain.
    Prints a line for each migration, in the order of execution. Without --do
    the command changes nothing, and stderr shows the option --do for this
    plan. With --do it carries out the plan: it confirms each migration before
    it begins the next one, and ends if one fails. A server is stopped while it
    is migrated. If the plan has changed since it was shown, no server is
    migrated. The plan is based on Placement, as in nova-accel fits; if Nova
    refuses a host for a server, the migration fails. Uses the credentials of
    the openstack command.

    The exit status is 0 if the servers fit or a plan was found, and 1
    otherwise or if a migration failed.
    """

    COLUMNS = 'Step', 'Server', 'Server ID', 'From', 'To', 'Result'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser, configuration.API)
        self.add_cloud_arguments(parser)
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument(
            '--for', metavar='FLAVOR', dest='flavor',
            help='name or id of the flavor to make room for')
        what.add_argument(
            '--group', metavar='ID',
            help='id of the server group to bring together')
        parser.add_argument(
            '--near', metavar='LEVEL',
            help='plan for one domain of this level of [accel] near')
        parser.add_argument(
            '-n', '--number', metavar='N', type=int, default=1,
            help='number of servers of the flavor that must fit (default: 1)')
        parser.add_argument(
            '--do', metavar='PLAN',
            help='carry out the plan with this number')
        return parser

    def take_action(self, parsed_args):
        if parsed_args.number < 1:
            raise exception.InvalidRequest(
                f'-n {parsed_args.number} was given, and there is nothing to '
                f'make room for: give a number from 1 up.')
        if parsed_args.group and not parsed_args.near:
            raise exception.InvalidRequest(
                '--group was given without --near: name the level of [accel] '
                'near in which its members come together.')
        self.check_columns(parsed_args, self.COLUMNS)
        configuration.read(parsed_args.config_file, configuration.API)
        cloud = self.cloud(parsed_args)
        if parsed_args.group:
            now, name = State(cloud), 'the members'
            goal = _together(cloud, now, parsed_args.group, parsed_args.near)
        else:
            flavor = cloud.flavor(parsed_args.flavor)
            wanted = why.Question.of(flavor, {})
            now, name = State(cloud), flavor['name']
            goal = defrag.Goal(wanted, parsed_args.number, parsed_args.near)
        if goal.level:
            fits.check_level(goal.level, (
                naming.near_of(host.providers[0].traits)
                for host in now.hosts.values()))
        plan = defrag.plan(now.hosts, now.servers, goal)
        self.status = int(plan is None)
        if parsed_args.do and (plan is None or plan.id != parsed_args.do):
            raise exception.InvalidRequest(
                f'Plan {parsed_args.do} was not carried out, because the '
                f'present plan is another one: nothing was moved; give the '
                f'command without --do, and read the plan again.')
        if plan is None:
            self.app.stderr.write(
                f'No migrations were found after which {goal.amount} of {name} '
                f'{_reached(goal, goal.amount)}: see nova-accel fits'
                + (f' {name}' if parsed_args.flavor else '')
                + (f' --near {goal.level}' if goal.level else '')
                + ' --by-host.\n')
            return self.COLUMNS, []
        results = [_PLANNED] * len(plan.moves)
        if parsed_args.do:
            self._carry_out(cloud, plan, now, goal, results)
        else:
            self._show(plan, goal, name, parsed_args)
        return self.COLUMNS, [
            (step, now.names[move.server], move.server, move.source,
             move.target, result)
            for step, (move, result)
            in enumerate(zip(plan.moves, results), 1)]

    def _show(self, plan, goal, name, parsed_args):
        moves = len(plan.moves)
        again = (f'--group {parsed_args.group}' if parsed_args.group
                 else f'--for {name} -n {goal.amount}') + (
            f' --near {goal.level}' if goal.level else '')
        self.app.stderr.write(
            f'{plan.now} of {name} {_reached(goal, plan.now)} now' + (
                f', and nothing has to move for {goal.amount}.\n'
                if not moves else
                f'; after {moves} migration{"s" * (moves != 1)}'
                f'{"" if plan.is_shortest else " (fewer may do)"} '
                f'{plan.then} {_reached(goal, plan.then)}. To carry them out: '
                f'nova-accel defrag {again} --do {plan.id}\n'))

    def _carry_out(self, cloud, plan, now, goal, results):
        for step, move in enumerate(plan.moves):
            try:
                if step:
                    now = State(cloud)
                _check(now, goal, plan, step)
                with output.waiting(
                        self.app.stderr, f'{step} of {len(results)} migrations '
                        f'are done, and server {now.names[move.server]} '
                        f'migrates to {move.target}', _LONGEST):
                    _migrate(cloud, move, now.services[move.target])
            except exception.AcceleratorError as error:
                self.status = 1
                results[step] = str(error)
                self.app.stderr.write(
                    f'{error} {step} of {len(results)} migrations are done, '
                    f'and no more are begun.\n')
                return
            results[step] = _DONE


def _reached(goal, number):
    """Return the predicate of a sentence about a number of servers: "fit", or
    for a server group "are", and the domain."""
    is_one = number == 1
    verb = (('is' if is_one else 'are') if goal.members
            else f'fit{"s" * is_one}')
    return verb + (f' in one {goal.level}' if goal.level else '')


def _check(now, goal, plan, step):
    """Check that the moves of a plan from ``step`` on are still possible, and
    reach the goal."""
    try:
        then = defrag.after(plan.moves[step:], now.hosts, now.servers, goal)
    except defrag.Changed as error:
        raise exception.InvalidRequest(
            f'Server {error} is not migrated, because it is not where it '
            f'was, or the room for it is taken.') from error
    if then < plan.then:
        raise exception.InvalidRequest(
            f'Server {plan.moves[step].server} is not migrated, because after '
            f'the rest of the plan it would not be {plan.then} servers that '
            f'{"are together" if goal.members else "fit"}, but {then}.')


def _together(cloud, now, uuid, level):
    """Return the goal to bring all members of a server group into one domain.

    :raises InvalidRequest: a member cannot be migrated, or the group is empty.
    """
    group = cloud.server_group(uuid)
    fixed = sorted(set(group['members']) - now.names.keys())
    if fixed or not group['members']:
        raise exception.InvalidRequest(
            f'The server group {text.printable(uuid)} '
            + (f'has members that cannot be migrated now '
               f'({text.some(fixed)}): see that they are ACTIVE or SHUTOFF, '
               f'not locked, and have accelerators.' if fixed
               else 'has no members: name another one.'))
    flavors = {id(one.wanted): one.wanted for servers in now.servers.values()
               for one in servers if one.uuid in group['members']}
    return defrag.Goal(
        [*flavors.values()][0] if len(flavors) == 1 else None,
        len(group['members']), level, frozenset(group['members']),
        'anti-affinity' in group['policies'])


class State:
    """The present hosts with accelerators, and servers that can migrate."""

    def __init__(self, cloud: clouds.Cloud):
        there = [host for host in fits.hosts(cloud) if not host.wrong]
        self.hosts = {host.name: host.known for host in there}
        #: node -> host of its nova-compute
        self.services = {host.name: host.service for host in there}
        #: UUID -> name of a server
        self.names: dict[str, str] = {}
        self._wanted: dict[str, capacity.Wanted] = {}
        self.servers = {
            host.name: list(self._of_host(cloud, host)) for host in there}

    def _of_host(self, cloud, host):
        for server in cloud.servers(host=host.service):
            given = {p.uuid: p.allocations[server['id']]
                     for p in host.known.providers
                     if server['id'] in p.allocations}
            if given and _may_move(server, host.name):
                try:
                    wanted = self._asked(server['flavor'], given)
                except exception.InvalidRequest:
                    # nova-api did not check this flavor when it was created
                    continue
                self.names[server['id']] = output.clean(server['name'])
                yield defrag.Server(server['id'], wanted, given)

    def _asked(self, flavor, given):
        # a server that boots from a volume needs no disk of its host
        local = any('DISK_GB' in amounts for amounts in given.values())
        key = json.dumps([flavor, local], sort_keys=True)
        if key not in self._wanted:
            self._wanted[key] = why.Question.of_any({
                **flavor, 'name': flavor['original_name'],
                'OS-FLV-EXT-DATA:ephemeral': flavor['ephemeral'],
                'disk': flavor['disk'] if local else 0}, {})
        return self._wanted[key]


def _may_move(server: Mapping, node: str) -> bool:
    return (server['status'] in _STEADY
            and server['OS-EXT-STS:task_state'] is None
            and not server.get('locked')
            and server['OS-EXT-SRV-ATTR:hypervisor_hostname'] == node)


def _migrate(cloud, move, host):
    """Migrate a server to a host, and confirm it.

    :raises AcceleratorError: Nova refuses, or the migration failed.
    """
    what = f'the migration of server {move.server} to {host}'
    _act(cloud, move.server, what, {'migrate': {'host': host}})
    server = _await(cloud, move.server, what, ('VERIFY_RESIZE',))
    if server['status'] != 'VERIFY_RESIZE':
        raise exception.ServiceUnavailable(
            f'Nova was asked for {what}, and it is {server["status"]} on '
            f'{server["OS-EXT-SRV-ATTR:hypervisor_hostname"]}: see openstack '
            f'server event list {move.server}.')
    what = f'confirming {what}'
    _act(cloud, move.server, what, {'confirmResize': None})
    server = _await(cloud, move.server, what, _STEADY)
    if server['OS-EXT-SRV-ATTR:hypervisor_hostname'] != move.target:
        raise exception.ServiceUnavailable(
            f'Nova was asked for {what}, and it is on '
            f'{server["OS-EXT-SRV-ATTR:hypervisor_hostname"]}.')


def _act(cloud, server, what, body):
    with clouds.asking('compute', what):
        cloud.adapter('compute').post(f'/servers/{server}/action', json=body)


def _await(cloud, server, what, statuses):
    """Wait until a server has one of these statuses, and Nova has no task for
    it. Return Nova's entry of the server."""
    end = time.monotonic() + _LONGEST
    while time.monotonic() < end:
        found = cloud.get('compute', f'/servers/{server}', key='server')
        if found['status'] in statuses or found['status'] == 'ERROR' or (
                found['status'] != 'VERIFY_RESIZE'
                and found['OS-EXT-STS:task_state'] is None):
            return found
        time.sleep(_PAUSE)
    raise exception.ServiceUnavailable(
        f'Nova was asked for {what}, and it has not ended within an hour: see '
        f'openstack server event list {server}.')
