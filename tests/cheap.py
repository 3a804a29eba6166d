# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Answers of libraries that are the same each time, kept for the process.

A third of the processor time of a functional test went into these. None changes
what is answered.

* Schemas are proven once, as ``tests/cheap_services.py`` says.
* Placement makes the aliases of its tables again for each statement, with all
  their columns.
* oslo.policy asks with each check how many arguments the check takes, and looks
  whether a file of rules has changed. It reads that of Nova's fixture for each
  cloud.
* oslo.versionedobjects goes through the names of all fields to see whether one
  is set, and through all fields to see what has changed.
* Nova's API compares each extra spec with more patterns than Python keeps.
* Listeners of the RPC transport in memory look 20 times a second whether a
  message has come. They sleep until one does.
"""

import functools
import inspect
import re
import threading
import time
import types

from oslo_messaging._drivers import impl_fake
from oslo_policy import _checks
from oslo_policy import policy
from oslo_versionedobjects import base as versioned
from placement.objects import allocation_candidate
from placement.objects import consumer
from placement.objects import inventory
from placement.objects import project
from placement.objects import research_context
from placement.objects import resource_provider
from placement.objects import trait
import sqlalchemy

from tests import cheap_services

#: those that make aliases
_PLACEMENT = (allocation_candidate, consumer, inventory, project,
              research_context, resource_provider, trait)
#: seconds after which a listener looks without having been told
LOOK = 1


def _alias_once(alias):
    """sqlalchemy.alias(), of tables that live as long as the process."""
    return functools.lru_cache(maxsize=None)(alias)


def _arguments_once(getfullargspec):
    """inspect.getfullargspec(), of a method that belongs to a class."""
    known = {}

    @functools.wraps(getfullargspec)
    def of(method):
        function = method.__func__
        if function not in known:
            known[function] = getfullargspec(method)
        return known[function]
    return of


def _parsed_once(parse):
    """parse_file_contents() of oslo.policy."""
    parsed = functools.lru_cache(parse)

    @functools.wraps(parse)
    def once(data):
        return dict(parsed(data))
    return once


def _loaded_once(load):
    """load_rules() of oslo.policy's enforcer."""
    @functools.wraps(load)
    def loaded(enforcer, force_reload=False):
        # a test may have set other rules, in place of all
        if (force_reload or not enforcer.rules
                or len(enforcer.rules) < len(enforcer.registered_rules)):
            load(enforcer, force_reload)
    return loaded


def _is_set(ask):
    """obj_attr_is_set() of an object."""
    @functools.wraps(ask)
    def is_set(self, name):
        if name in self.fields or name in self.obj_extra_fields:
            return hasattr(self, '_obj_' + name)
        # its own error
        return ask(self, name)
    return is_set


def _what_changed(self):
    """obj_what_changed() of an object."""
    changed = self._changed_fields & self.fields.keys()
    for attribute, value in list(vars(self).items()):
        if (isinstance(value, versioned.VersionedObject)
                and attribute.startswith('_obj_')
                and attribute[5:] in self.fields
                and value.obj_what_changed()):
            changed.add(attribute[5:])
    return changed


class _Post:
    """Messages of the RPC transport in memory are announced."""

    def __init__(self):
        self._sent = 0
        self._came = threading.Condition()
        self._seen = threading.local()

    def announcing(self, act):
        """A method after which listeners have something to see."""
        @functools.wraps(act)
        def announced(*args, **kwargs):
            act(*args, **kwargs)
            with self._came:
                self._sent += 1
                self._came.notify_all()
        return announced

    def sleep(self, _seconds):
        """Of a listener that saw nothing: until there is something new."""
        with self._came:
            # nothing came after its last sleep, so before it looked
            if vars(self._seen).get('sent') == self._sent:
                self._came.wait(LOOK)
            self._seen.sent = self._sent


@functools.cache
def placement() -> None:
    """Do so for Placement."""
    cheap_services.schemas()
    tables = types.SimpleNamespace(**{
        **vars(sqlalchemy), 'alias': _alias_once(sqlalchemy.alias)})
    for module in _PLACEMENT:
        module.sa = tables
    _checks.inspect = types.SimpleNamespace(
        getfullargspec=_arguments_once(inspect.getfullargspec))
    policy.parse_file_contents = _parsed_once(policy.parse_file_contents)
    policy.Enforcer.load_rules = _loaded_once(policy.Enforcer.load_rules)


@functools.cache
def nova() -> None:
    """Do so for Nova's services."""
    re._MAXCACHE = 1 << 14
    versioned.VersionedObject.obj_attr_is_set = _is_set(
        versioned.VersionedObject.obj_attr_is_set)
    versioned.VersionedObject.obj_what_changed = _what_changed
    post = _Post()
    impl_fake.time = types.SimpleNamespace(
        **{**vars(time), 'sleep': post.sleep})
    for owner, name in ((impl_fake.FakeExchange, 'deliver_message'),
                        (impl_fake.FakeListener, 'stop')):
        setattr(owner, name, post.announcing(getattr(owner, name)))
