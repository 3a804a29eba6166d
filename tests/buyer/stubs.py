# Licensed under the Apache License, Version 2.0. See LICENSE.
"""python stubs.py STEP [NAME=VALUE...]: answer a step of the suite.

The cloud and the credentials are those of the command openstack: OS_CLOUD, or
OS_AUTH_URL and the like. The steps of fleet.yaml need an administrator's, and
the command nova-accel.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import openstack
import paramiko

#: what nova-accel tree shows of a device that is not well
SICK = 'fenced', 'suspect'
#: Nova's status -> the suite's word
STATES = {'ACTIVE': 'running', 'SHUTOFF': 'stopped', 'BUILD': 'pending',
          'DELETED': 'terminated'}
#: what nova-accel tree shows of a device that is not well
SICK = 'fenced', 'suspect'
SECONDS = 600
#: of a journal: nothing of the last server is left; and the GPU reported that
#: it had cleared its memory
CLEAN, CLEARED = 'clean', 'cleared'


def cloud():
    return openstack.connect()


# VM: what a tenant does


def launch_instance(name, flavor, image, network, user):
    api = cloud()
    key = paramiko.RSAKey.generate(2048)
    path = pathlib.Path(tempfile.mkdtemp()) / 'key'
    key.write_private_key_file(str(path))
    pair = api.compute.create_keypair(
        name=f'{name}-{os.getpid()}',
        public_key=f'{key.get_name()} {key.get_base64()}')
    server = api.compute.create_server(
        name=name, key_name=pair.name,
        flavor_id=api.compute.find_flavor(flavor, ignore_missing=False).id,
        image_id=api.image.find_image(image, ignore_missing=False).id,
        networks=network if network in ('auto', 'none') else [
            {'uuid': api.network.find_network(
                network, ignore_missing=False).id}],
        metadata={'Name': name, 'CreatedBy': 'ai-cloud-validation'})
    try:
        server = api.compute.wait_for_server(server, wait=SECONDS)
    except Exception:
        # the step for its end would not know it
        api.compute.delete_server(server)
        api.compute.delete_keypair(pair.name)
        raise
    return {**instance(server), 'requested_key_name': pair.name,
            'key_name': server.key_name, 'key_file': str(path),
            'ssh_user': user}


def instance(server):
    addresses = [a['addr'] for found in (server.addresses or {}).values()
                 for a in sorted(found, key=lambda a: a.get(
                     'OS-EXT-IPS:type') != 'floating')]
    return {'instance_id': server.id,
            'state': STATES.get(server.status, 'pending'),
            'public_ip': server.access_ipv4 or next(iter(addresses), ''),
            # without networks, the servers of a project are what belongs
            # together
            'vpc_id': next(iter(server.addresses or ()), server.project_id),
            'instance_type': server.flavor['original_name']}


def list_instances(id):
    found = [instance(server) for server in cloud().compute.servers()]
    return {'instances': found, 'count': len(found), 'target_instance': id,
            'found_target': id in [one['instance_id'] for one in found]}


def verify_tags(id):
    tags = cloud().compute.get_server(id).metadata
    return {'instance_id': id, 'tags': tags, 'tag_count': len(tags)}


def serial_console(id):
    text = cloud().compute.get_server_console_output(id)['output'] or ''
    return {'instance_id': id, 'console_available': bool(text),
            'output_length': len(text)}


def describe_instance(id, key, user):
    return {**instance(cloud().compute.get_server(id)), 'key_file': key,
            'ssh_user': user}


def stop_instance(id):
    api = cloud()
    api.compute.stop_server(id)
    server = api.compute.wait_for_server(
        api.compute.get_server(id), 'SHUTOFF', wait=SECONDS)
    return {**instance(server), 'stop_initiated': True}


def start_instance(id, key, user):
    api = cloud()
    api.compute.start_server(id)
    return {**started(api, id, key, user), 'start_initiated': True}


def reboot_instance(id, key, user):
    api = cloud()
    before = uptime(instance(api.compute.get_server(id)), key, user)
    began = time.monotonic()
    api.compute.reboot_server(id, 'HARD')
    found = started(api, id, key, user)
    now = found['uptime_seconds']
    return {**found, 'reboot_initiated': True, 'reboot_confirmed': (
        None not in (before, now)
        # it was not up all the time since the request
        and now < before + time.monotonic() - began)}


def started(api, id, key, user):
    """Wait until a server runs and its guest answers."""
    server = api.compute.wait_for_server(
        api.compute.get_server(id), wait=SECONDS)
    found, end = instance(server), time.monotonic() + SECONDS / 2
    while (up := uptime(found, key, user)) is None and time.monotonic() < end:
        time.sleep(2)
    return {**found, 'key_file': key, 'ssh_user': user,
            'ssh_ready': up is not None, 'uptime_seconds': up}


def uptime(found, key, user):
    """Return the seconds since a guest booted; None if it does not answer."""
    with (contextlib.suppress(OSError, paramiko.SSHException, EOFError),
          paramiko.SSHClient() as ssh):
        ssh.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        ssh.connect(found['public_ip'], username=user, key_filename=key,
                    timeout=10, allow_agent=False, look_for_keys=False)
        return float(ssh.exec_command(
            'cat /proc/uptime')[1].read().split()[0])


def teardown(id, key, name):
    api = cloud()
    server = api.compute.get_server(id)
    api.compute.delete_server(server)
    api.compute.wait_for_delete(server, wait=SECONDS)
    api.compute.delete_keypair(name)
    pathlib.Path(key).unlink()
    return {'resources_deleted': [id, name],
            'message': 'server and key pair deleted'}


# The fleet: what a provider shows


def tree():
    """Return the accelerators of the cloud, as Placement has them."""
    return [row for row in json.loads(subprocess.run(
        ['nova-accel', 'tree', '-f', 'json'], check=True,
        stdout=subprocess.PIPE).stdout) if row['Class']]


def hosts(api, rows):
    """Return host -> (its accelerators, what is wrong with it)."""
    up = {service.host for service in api.compute.services(
        binary='nova-compute') if service.state == 'up'}
    found = {row['Host']: ([], []) for row in rows}
    for host, (_, alerts) in found.items():
        if host not in up:
            alerts.append(('nova-compute', 'down'))
    for row in rows:
        own, alerts = found[row['Host']]
        own.append(row)
        if row['Health'] in SICK:
            alerts.append((row['Provider'], row['Health']))
    for server, name, text in told(api):
        if server.hypervisor_hostname in found:
            found[server.hypervisor_hostname][1].append((name, text))
    return found


def told(api):
    """What owners read in the metadata of their servers, of sick devices."""
    return [(server, name, text)
            for server in api.compute.servers(all_projects=True)
            for name, text in server.metadata.items()
            if name.startswith('accel') and name.endswith(':health')]


def query_governance_metrics():
    api, rows = cloud(), tree()
    found = hosts(api, rows)
    running = {server.id for server in api.compute.servers(all_projects=True)
               if server.status == 'ACTIVE'}

    def count(amount, node):
        return {'gpus': sum(amount(row) for row in rows
                            if 'GPU' in row['Class']),
                'nodes': sum(bool(node(*one)) for one in found.values())}

    def active(row):
        return sum(held['amount'] for held in row['Held by']
                   if held['id'] in running)
    return {'metrics': {
        'delivered': count(lambda row: row['Total'], lambda *one: True),
        'healthy': count(
            lambda row: 0 if row['Health'] in SICK else
            row['Total'] - row['Reserved'], lambda own, alerts: not alerts),
        'reserved': count(lambda row: row['Used'], lambda own, alerts: any(
            row['Used'] for row in own)),
        'active': count(active, lambda own, alerts: any(map(active, own)))}}


def query_resource_discovery(interval):
    polls = []
    for poll in range(2):
        time.sleep(poll * int(interval))
        polls.append([row['UUID'] for row in tree()])
    return {'polls': len(polls), 'poll_interval_seconds': int(interval),
            'unstable_identifiers': sorted({*polls[0]} - {*polls[-1]}),
            'resources_checked': len(polls[-1]),
            'resources': [{'resource_id': uuid, 'discovered': True}
                          for uuid in polls[-1]]}


def query_host_health():
    found = hosts(cloud(), tree())
    return {'hosts_checked': len(found), 'hosts': [{
        'host_id': host, 'health_present': True,
        'probe_ids': [row['Provider'] for row in own],
        'alerts': [{'id': name, 'message': text,
                    'classifications': ['accelerator']}
                   for name, text in alerts]}
        for host, (own, alerts) in found.items()]}


def query_health_aggregation():
    api = cloud()
    found = hosts(api, tree())
    groups = []
    for zone in api.compute.availability_zones(details=True):
        members = found.keys() & (zone.hosts or {}).keys()
        sick = sorted(host for host in members if found[host][1])
        if members:
            groups.append({
                'group_id': zone.name, 'name': zone.name,
                'group_type': 'availability zone', 'total': len(members),
                'healthy': len(members) - len(sick), 'unhealthy': len(sick),
                'status': 'Degraded' if sick else 'Healthy',
                'unhealthy_hosts': sick})
    return {'aggregation_level': 'availability zone', 'groups': groups}


def query_sanitization(journals):
    """From HOST.handovers.json and HOST.discover.json, of each host.

    nova-accel writes them on the host, with -f json.
    """
    machines = []
    for path in sorted(pathlib.Path(journals).glob('*.handovers.json')):
        host = path.name.removesuffix('.handovers.json')
        released = json.loads(path.read_text())
        machines += [
            machine(host, row, [one for one in released if one['Server']
                                and one['Device'] == row['Device']])
            for row in json.loads(
                path.with_name(f'{host}.discover.json').read_text())]
    # the rows would pass without any evidence
    if not any(one['served_tenant'] for one in machines):
        raise LookupError(f'no device in {journals} has had a server')
    return {'machines_checked': len(machines), 'machines': machines}


def machine(host, device, released):
    """Return what became of a device after each of its servers."""
    free = device['Total'] > device['Used'] and device['Health'] not in SICK
    has_gpu = 'GPU' in device['What']
    transitions = []
    for row in released:
        transitions.append('in_use')
        shown = json.loads(row['Shown'] or '{}')
        # of a GPU, a reset alone does not show that its memory is clear
        if (row['Method'] != 'none' and row['Result'] == CLEAN
                and (not has_gpu or shown.get('memory') == CLEARED)):
            transitions.append('sanitizing')
        transitions.append('available')
    return {
        'machine_id': f'{host} {device["Device"]}', 'transitions': transitions,
        'status': 'available' if free else 'in_use' if device['Used'] else
        'withheld', 'available': free, 'in_use': bool(device['Used']),
        'has_gpu': has_gpu, 'served_tenant': bool(released),
        'sanitized': transitions.count('sanitizing') == len(released),
        'stale_tenant_binding': free and bool(device['Held by'])}


def query_failure_notifications():
    return {'notification_channel_observable': True, 'notifications': [
        {'machine_id': server.id, 'type': name, 'message': text,
         'notified_at': server.updated_at}
        for server, name, text in told(cloud())]}


def main(step, *arguments):
    answer = {'success': True, 'platform': 'openstack'}
    try:
        answer |= globals()[step](**dict(
            argument.split('=', 1) for argument in arguments))
    except Exception as error:
        answer |= {'success': False, 'error': f'{type(error).__name__}: '
                                              f'{error}'}
    print(json.dumps(answer))
    return not answer['success']


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
