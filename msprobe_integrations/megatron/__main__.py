"""``python -m msprobe_integrations.megatron <script> --msprobe-config probe.yaml <the script's own arguments>``"""

import sys

from msprobe_integrations.megatron.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
