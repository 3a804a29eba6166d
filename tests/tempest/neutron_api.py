# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Neutron's API, for tests/lab/serve.py."""

from neutron.wsgi.api import application
import sqlalchemy.orm

__all__ = ['application']
# else the first query misses the backref Port.port_forwardings
sqlalchemy.orm.configure_mappers()
