# what stands beside Intel's bindings, and says that it was sourced
echo ":: oneCCL's variables are set"
