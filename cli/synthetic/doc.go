// Package synthetic carries transfers without an engine. It has a paged cache whose bytes
// follow a known pattern (Pool), and a prefill agent in a second process that runs commands
// (Start, Serve). kvconn demo, kvconn bench and the test rig are made of it.
package synthetic
