"""The monitor under the name, arguments and files of the existing tool."""
