"""Any GPU, depthwise convolutions and others of few channels a group: bound by memory, not by multiplication."""
