# sh secrets.sh
#
# Makes secrets/, which only you can enter: a login for each part, and the SQL that creates them (docs/manual/operating.md).
set -eu
umask 077
mkdir secrets
cd secrets
random() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n'; }
login() { # name, file, rights
  password=$(random)
  echo "postgresql://$1:$password@127.0.0.1:15432/jobs" > "$2"
  echo "create role $1 login password '$password' $3;" >> init.sql
}
random > postgres_password
for role in viewer submitter worker host notifier admin; do
  echo "create role gangq_$role;" >> init.sql
done
login jobs_owner owner.dsn 'in role gangq_admin'
login jobs_worker worker.dsn 'in role gangq_worker, gangq_submitter'
login jobs_viewer viewer.dsn 'in role gangq_viewer'
cat >> init.sql <<SQL
create database jobs owner jobs_owner encoding 'UTF8' template template0;
revoke temporary on database jobs from public;
SQL
chmod 644 postgres_password init.sql # their container's postgres reads these two
