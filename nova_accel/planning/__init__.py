# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Answers to operators about hosts: why a host cannot take a server, how many
servers fit, and which migrations make room."""
