# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Ceilometer and its files in etc, which read our notifications."""

import json
import os
import shutil
import subprocess

import yaml

ETC = os.path.join(os.path.dirname(__file__), '../../etc/nova_accel')
METERS = os.path.join(ETC, 'ceilometer/meters.d/nova_accel.yaml')
EVENTS = os.path.join(ETC, 'ceilometer/event_definitions.yaml')
RESOURCES = os.path.join(ETC, 'ceilometer/gnocchi_resources.yaml')
#: prints what Ceilometer makes of a notification: samples and traits
_READ = """
import json, sys, yaml
from ceilometer import sample, service
from ceilometer.event import converter
from ceilometer.meter import notifications
from ceilometer.publisher import gnocchi
from stevedore import extension
conf = service.prepare_service([], [])
conf.set_override('meter_definitions_dirs', [sys.argv[1]], 'meter')
conf.set_override('definitions_cfg_file', sys.argv[2], 'event')
message = json.load(sys.stdin)
meters = notifications.ProcessMeterNotifications(conf, None)
plugins = extension.ExtensionManager(
    namespace='ceilometer.event.trait_plugin')
resources = {name: resource for resource in [
    gnocchi.ResourcesDefinition(item, 'low', None, plugins)
    for item in yaml.safe_load(open(sys.argv[3]))]
    for name in resource.metrics}
samples = [{'name': s.name, 'volume': s.volume, 'resource_id': s.resource_id,
            'metadata': s.resource_metadata,
            'is_in_gnocchi': s.name in resources,
            'attributes': resources[s.name].sample_attributes(s)}
           for s in meters.build_sample(message)]
event = converter.setup_events(conf, plugins).to_event('info', message)
print(json.dumps([samples, {t.name: t.value for t in event.traits}]))
"""


def needs(test, *programs):
    for program in programs:
        if not shutil.which(program):
            test.skipTest(f'{program} is not installed: see bindep.txt')


def read(path):
    with open(path, encoding='utf-8') as file:
        return yaml.safe_load(file)


def by_ceilometer(test, message):
    """Samples and traits of a notification."""
    needs(test, 'ceilometer-agent-notification')
    python = os.path.join(os.path.dirname(os.path.realpath(
        shutil.which('ceilometer-agent-notification'))), 'python')
    done = subprocess.run(
        [python, '-W', 'ignore', '-c', _READ, os.path.dirname(METERS),
         EVENTS, RESOURCES], input=json.dumps(message),
        capture_output=True, text=True, timeout=120)
    test.assertEqual(0, done.returncode, done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
