"""The monitors under the names, arguments and files of the existing tool."""
