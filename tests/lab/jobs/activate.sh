# what a vendor's setvars.sh or an environment's activate does
export T_ACTIVATED="by $(hostname), it's sourced"
