# Licensed under the Apache License, Version 2.0. See LICENSE.

project = 'nova_accel'
extensions = ['oslo_config.sphinxext', 'reno.sphinxext']
master_doc = 'index'
html_theme = 'alabaster'
