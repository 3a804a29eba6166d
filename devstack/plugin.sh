#!/bin/bash
#
# DevStack plugin of nova_accel. In local.conf:
#
#   [[local|localrc]]
#   enable_plugin nova_accel <URL of the repository> <branch>
#
# devstack/settings has its variables.

# In place, as DevStack installs Nova: changes of the clone count at the next start.
function install_nova_accel {
    setup_develop "$NOVA_ACCEL_DIR"
}

# start_nova_compute copies $NOVA_CONF for nova-compute, so that everything
# belongs there.
function configure_nova_accel {
    local etc=$NOVA_ACCEL_DIR/etc/nova_accel

    if is_service_enabled n-cpu; then
        iniset "$NOVA_CONF" DEFAULT compute_driver accel.AccelLibvirtDriver
        iniset "$NOVA_CONF" accel enabled_drivers "$NOVA_ACCEL_DRIVERS"
        sudo install -o root -g root -m 644 "$etc"/rootwrap.d/*.filters \
            "$NOVA_CONF_DIR/rootwrap.d"
        if [[ "$NOVA_ACCEL_SIMULATED" == "True" ]]; then
            # nova-compute keeps the state of the cards beside the file
            cp "$etc/simulated-host.yaml" "$NOVA_STATE_PATH"
            iniset "$NOVA_CONF" accel simulated_host \
                "$NOVA_STATE_PATH/simulated-host.yaml"
        fi
    fi

    if is_service_enabled n-sch; then
        iniset_multiline "$NOVA_CONF" filter_scheduler available_filters \
            nova.scheduler.filters.all_filters \
            nova_accel.scheduler.filters.AcceleratorFilter
        iniset "$NOVA_CONF" filter_scheduler enabled_filters \
            "$NOVA_FILTERS,AcceleratorFilter"
        iniset "$NOVA_CONF" filter_scheduler weight_classes \
            nova.scheduler.weights.all_weighers,nova_accel.scheduler.weights.AcceleratorWeigher
    fi

    if is_service_enabled n-api; then
        mkdir -p "$NOVA_CONF_DIR/device_profiles"
        cp "$etc"/device_profiles/*.yaml "$NOVA_CONF_DIR/device_profiles"
        iniset "$NOVA_CONF" accel device_profiles \
            "$NOVA_CONF_DIR/device_profiles"
    fi
}

if [[ "$1" == "stack" && "$2" == "install" ]]; then
    echo_summary "Installing nova_accel"
    install_nova_accel
elif [[ "$1" == "stack" && "$2" == "post-config" ]]; then
    echo_summary "Configuring nova_accel"
    configure_nova_accel
elif [[ "$1" == "clean" ]]; then
    rm -f "$NOVA_STATE_PATH"/simulated-host.yaml*
fi
