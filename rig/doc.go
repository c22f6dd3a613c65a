// Package rig and the packages below it test and measure kvconn: doubles of what it works with, faults, attacks, and
// the commands of kvconn-rig. kvconn stands without them: only tests and cmd/kvconn-rig import them. What kvconn
// itself stands on is in internal/.
package rig
