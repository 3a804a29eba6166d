# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Options of nova-scheduler with the filter and the weigher of nova_accel."""

OPTIONS = {
    'available_filters': [
        'nova.scheduler.filters.all_filters',
        'nova_accel.scheduler.filters.AcceleratorFilter'],
    'enabled_filters': ['ComputeFilter', 'AcceleratorFilter'],
    'weight_classes': [
        'nova.scheduler.weights.all_weighers',
        'nova_accel.scheduler.weights.AcceleratorWeigher'],
    'group': 'filter_scheduler'}
